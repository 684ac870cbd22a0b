// A CUDA device in the host's memory, for a torch without one: what is asked of it is written down.
//
// Kernels are the CPU's, and run when they are launched. The log says which memory each reads and
// writes on which stream, which events streams and the host wait for, and when memory is allocated
// and freed. torch itself is the real one: its dispatcher, its autograd engine with its threads and
// its choice of streams.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {
using namespace c10;
using Stack = torch::jit::Stack;
constexpr auto CUDA = DeviceType::CUDA;
constexpr int64_t HOST = -1, REGISTERED = -2; // as streams: what the host uses, and what it locked
constexpr int64_t POLLS = 2; // of an event that has not happened, before it has

// ---- The log: int64 words, one record after the other. The first word of each is its kind.
enum Kind : int64_t {
  KERNEL,        // stream, thread, name, accesses, then for each: writes?, block, begin, end
  RECORD,        // stream, event
  WAIT,          // stream, event
  HOST_EVENT,    // event, name, thread: the host has waited for it
  HOST_STREAM,   // stream, name, thread
  HOST_DEVICE,   // name, thread
  ALLOCATE,      // block, bytes, stream
  FREE,          // block, thread
  RECORD_STREAM, // block, stream
  NOTE,          // name, thread
};
std::mutex mutex;
std::vector<int64_t> words;
std::vector<std::string> names;
std::unordered_map<std::string, int64_t> numbers;
std::map<int64_t, std::pair<int64_t, int64_t>> locked; // memory of the host: address; bytes, block
std::map<int64_t, int64_t> reached; // by stream: the latest event that the host knows has happened
std::atomic<int64_t> streams{1}, events{1}, blocks{1}, threads{0}, allocated{0}, peak{0};
std::atomic<int64_t> refused{0}, error{0}; // what page-locking ends with; told to the next kernel
bool recording = false;
std::atomic<bool> stalled{false};
thread_local int64_t current = 0;

int64_t thread() {
  static thread_local int64_t own = threads++;
  return own;
}
int64_t number(const std::string& name) { // the mutex is held
  auto [found, fresh] = numbers.try_emplace(name, (int64_t)names.size());
  if (fresh) names.push_back(name);
  return found->second;
}
void note(std::initializer_list<int64_t> record) {
  std::lock_guard<std::mutex> guard(mutex);
  if (recording) words.insert(words.end(), record);
}
void note_named(Kind kind, std::initializer_list<int64_t> first, const std::string& name) {
  std::lock_guard<std::mutex> guard(mutex);
  if (!recording) return;
  words.push_back(kind);
  words.insert(words.end(), first);
  words.push_back(number(name));
  words.push_back(thread());
}

// ---- Memory
struct Block {
  int64_t id, bytes;
  char* memory;
  bool pinned;
};
void lock(void* address, int64_t bytes, int64_t id, int64_t owner) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    locked[(int64_t)address] = {bytes, id};
  }
  note({ALLOCATE, id, bytes, owner});
}
bool unlock(void* address) {
  int64_t id;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = locked.find((int64_t)address);
    if (found == locked.end()) return false;
    id = found->second.second;
    locked.erase(found);
  }
  note({FREE, id, thread()});
  return true;
}
void release(void* context) {
  auto* block = (Block*)context;
  if (block->pinned) unlock(block->memory);
  else {
    allocated -= block->bytes;
    note({FREE, block->id, thread()});
  }
  std::free(block->memory);
  delete block;
}
struct Memory final : Allocator {
  bool pinned;
  Memory(bool pinned) : pinned(pinned) {}
  DataPtr allocate(size_t bytes) override {
    auto device = pinned ? Device(kCPU) : Device(CUDA, 0);
    if (!bytes) return {nullptr, device};
    auto* block = new Block{blocks++, (int64_t)bytes, (char*)std::malloc(bytes + 64), pinned};
    std::memset(block->memory, 0xff, bytes); // NaN: what reads memory that nobody wrote is found
    if (pinned) lock(block->memory, bytes, block->id, HOST);
    else {
      allocated += block->bytes;
      if (allocated > peak) peak = allocated.load();
      note({ALLOCATE, block->id, block->bytes, current});
    }
    return {block->memory, block, &release, device};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Memory memory(false), page_locked(true);

Block* block_of(const Storage& storage) {
  auto& pointer = storage.unsafeGetStorageImpl()->mutable_data_ptr();
  return pointer.get_deleter() == &release ? (Block*)pointer.get_context() : nullptr;
}
// The page-locked memory that this is in: its block and address; none: 0.
std::pair<int64_t, int64_t> locked_at(const void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = locked.upper_bound((int64_t)address);
  if (found == locked.begin()) return {0, 0};
  --found;
  bool within = (int64_t)address < found->first + found->second.first;
  return within ? std::pair(found->second.second, found->first) : std::pair<int64_t, int64_t>(0, 0);
}
bool is_pinned(const void* address) { return locked_at(address).first != 0; }

// ---- Streams and events
Stream stream_of(int64_t id) { return Stream(Stream::UNSAFE, Device(CUDA, 0), id); }
struct Event {
  int64_t id, stream, polls;
  std::chrono::steady_clock::time_point time;
};
void reach(int64_t stream, int64_t event) { // and what is before it
  std::lock_guard<std::mutex> guard(mutex);
  reached[stream] = std::max(reached[stream], event);
}
bool happened(const Event& event) {
  std::lock_guard<std::mutex> guard(mutex);
  return event.id <= reached[event.stream];
}
void wait_for_stream(int64_t stream, const std::string& name) {
  reach(stream, events - 1);
  note_named(HOST_STREAM, {stream}, name);
}
void wait_for_device() {
  for (int64_t stream = 0; stream < streams; stream++) reach(stream, events - 1);
  note_named(HOST_DEVICE, {}, "synchronize");
}
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Device getDevice() const override { return Device(CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream_of(current); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(streams++); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream_of(streams++); }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto before = current;
    current = stream.id();
    return stream_of(before);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    if (!*event) *event = new Event();
    auto* own = (Event*)*event;
    *own = Event{events++, stream.id(), 0, std::chrono::steady_clock::now()};
    note({RECORD, stream.id(), own->id});
  }
  void block(void* event, const Stream& stream) const override {
    if (event) note({WAIT, stream.id(), ((Event*)event)->id});
  }
  bool queryEvent(void* event) const override { // the device is slow
    auto* own = (Event*)event;
    if (!own || happened(*own)) return true;
    if (stalled || own->polls++ < POLLS) return false;
    reach(own->stream, own->id);
    note_named(HOST_EVENT, {own->id}, "event.query");
    return true;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Event*)event; }
  bool queryStream(const Stream&) const override { return false; }
  void synchronizeStream(const Stream& stream) const override {
    wait_for_stream(stream.id(), "stream.synchronize");
  }
  void synchronizeEvent(void* event) const override {
    auto* own = (Event*)event;
    if (!own) return;
    reach(own->stream, own->id);
    note_named(HOST_EVENT, {own->id}, "event.synchronize");
  }
  void synchronizeDevice(DeviceIndex) const override { wait_for_device(); }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    auto spent = ((Event*)second)->time - ((Event*)first)->time;
    return std::chrono::duration<double, std::milli>(spent).count();
  }
  void recordDataPtrOnStream(const DataPtr& pointer, const Stream& stream) const override {
    if (pointer.get_deleter() == &release)
      note({RECORD_STREAM, ((Block*)pointer.get_context())->id, stream.id()});
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return Device(CUDA, 0); }
  Allocator* getPinnedMemoryAllocator() const override { return &page_locked; }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  void deviceSynchronize(DeviceIndex) const override { wait_for_device(); }
};

// ---- Kernels
struct Access {
  bool writes;
  int64_t block, begin, end;
};

// The CPU's tensor of the same memory.
at::Tensor on_host(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto storage = tensor.storage();
  auto* data = storage.mutable_data();
  DataPtr pointer(data, new Storage(storage), [](void* kept) { delete (Storage*)kept; }, kCPU);
  Storage alias(Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), nullptr, false);
  auto made = at::detail::make_tensor<TensorImpl>(std::move(alias), DispatchKeySet(DispatchKey::CPU), impl->dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  return made;
}
at::Tensor like_host(const at::Tensor& host, Storage storage) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), host.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return made;
}
Storage stored(size_t bytes) {
  return Storage(Storage::use_byte_size_t(), bytes, memory.allocate(bytes), &memory, true);
}
void resize_storage(const Storage& storage, size_t bytes) {
  auto fresh = memory.allocate(bytes);
  auto* impl = storage.unsafeGetStorageImpl();
  auto kept = std::min(bytes, impl->nbytes());
  if (kept) std::memcpy(fresh.get(), impl->data(), kept);
  impl->set_data_ptr(std::move(fresh));
  impl->set_nbytes(bytes);
}

// The bytes that it covers, from its first element to its last.
void add(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  auto* block = block_of(tensor.storage());
  auto place = block ? std::pair(block->id, (int64_t)block->memory) : locked_at(tensor.storage().data());
  if (!place.first) return;
  int64_t size = tensor.element_size(), last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  auto begin = (int64_t)tensor.storage().data() - place.second + tensor.storage_offset() * size;
  accesses.push_back({writes, place.first, begin, begin + (last + 1) * size});
}
void launch(const std::string& name, const std::vector<Access>& accesses, int64_t stream) {
  // PyTorch asks for the latest error behind each kernel, whose ever it was
  auto earlier = stream == HOST ? 0 : error.exchange(0);
  TORCH_CHECK(!earlier, "CUDA error ", earlier, ", of an earlier call");
  std::lock_guard<std::mutex> guard(mutex);
  if (!recording || accesses.empty()) return;
  words.insert(words.end(), {KERNEL, stream, thread(), number(name), (int64_t)accesses.size()});
  for (auto& a : accesses) words.insert(words.end(), {a.writes, a.block, a.begin, a.end});
}

// One call of an operation: its tensors are replaced by the CPU's and put back.
struct Call {
  std::vector<Access> accesses;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs; // ours, the CPU's
  bool masks = false, host = false; // whether a tensor with dimensions is on the host

  at::Tensor translate(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    host |= tensor.device().is_cpu() && tensor.dim();
    if (!tensor.is_cuda()) return tensor;
    add(accesses, tensor, writes);
    masks |= !writes && (tensor.scalar_type() == kBool || tensor.scalar_type() == kByte);
    auto made = on_host(tensor);
    if (writes && tensor.numel() == 0) made = at::detail::empty_generic(tensor.sizes(), GetAllocator(kCPU), DispatchKeySet(DispatchKey::CPU), tensor.scalar_type(), std::nullopt);
    pairs.emplace_back(tensor, made);
    return made;
  }
  IValue translate(const IValue& value, bool writes) {
    if (value.isTensor()) return translate(value.toTensor(), writes);
    if (value.isTensorList()) {
      auto list = value.toTensorList().copy();
      for (size_t i = 0; i < list.size(); i++) list.set(i, translate(list.get(i), writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList().copy();
      for (size_t i = 0; i < list.size(); i++) {
        std::optional<at::Tensor> each = list.get(i);
        if (each) list.set(i, translate(*each, writes));
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(kCPU);
    return value;
  }
  // What an operation gave: an argument, a view of one, or fresh memory.
  at::Tensor back(const at::Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (auto& [ours, theirs] : pairs)
      if (theirs.is_same(host)) return ours;
    for (auto& [ours, theirs] : pairs)
      if (theirs.storage().data() && theirs.storage().data() == host.storage().data())
        return like_host(host, ours.storage());
    auto bytes = host.storage().nbytes();
    auto made = like_host(host, stored(bytes));
    if (bytes) std::memcpy(made.storage().mutable_data(), host.storage().data(), bytes);
    add(accesses, made, true);
    return made;
  }
  IValue back(const IValue& value) {
    if (value.isTensor()) return back(value.toTensor());
    if (!value.isTensorList()) return value;
    auto list = value.toTensorList().copy();
    for (size_t i = 0; i < list.size(); i++) list.set(i, back(list.get(i)));
    return list;
  }
  // What was given without elements may have got some.
  void resize() {
    for (auto& [ours, theirs] : pairs) {
      if (ours.numel() || !theirs.numel()) continue;
      auto bytes = theirs.storage().nbytes();
      resize_storage(ours.storage(), bytes);
      std::memcpy(ours.storage().mutable_data(), theirs.storage().data(), bytes);
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
      add(accesses, ours, true);
    }
  }
};

std::string words_of(const OperatorHandle& op) {
  auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}
// Whether the host cannot go on without values.
bool waits(const OperatorHandle& op, const std::string& name, const Call& call) {
  if (name == "aten::index.Tensor" || name == "aten::_index_put_impl_") return call.masks;
  for (auto& tag : op.getTags())
    if (tag == at::Tag::data_dependent_output || tag == at::Tag::dynamic_output_shape) return true;
  return false;
}
void kernel(const OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto& schema = op.schema();
  auto name = words_of(op);
  size_t n = schema.arguments().size(), first = stack->size() - n;
  Call call;
  for (size_t i = 0; i < n; i++) {
    auto* alias = schema.arguments()[i].alias_info();
    (*stack)[first + i] = call.translate((*stack)[first + i], alias && alias->isWrite());
  }
  bool indexes = name == "aten::index.Tensor" || name == "aten::_index_put_impl_"; // takes both
  TORCH_CHECK(!call.host || call.pairs.empty() || indexes, name, " of tensors on the device and on the host");
  // one value is put at a mask without counting it
  if (name == "aten::_index_put_impl_" && (*stack)[first + 2].toTensor().numel() == 1) call.masks = false;
  bool softmax = name == "aten::_softmax" || name == "aten::_log_softmax";
  if (softmax && (*stack)[first + 2].toBool()) { // of half precision to fp32: the CPU has none
    (*stack)[first] = (*stack)[first].toTensor().to(kFloat);
    (*stack)[first + 2] = false;
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = call.back((*stack)[i]);
  call.resize();
  bool views = false; // touch no memory
  for (auto& each : schema.returns()) views |= each.alias_info() && !each.alias_info()->isWrite();
  if (!views) launch(name, call.accesses, current);
  if (waits(op, name, call)) wait_for_stream(current, name);
}
void copy(const OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto arguments = torch::jit::pop(*stack, 3);
  auto to = arguments[0].toTensor(), from = arguments[1].toTensor();
  bool blocks = !arguments[2].toBool(), crosses = to.is_cuda() != from.is_cuda();
  Call call;
  add(call.accesses, from, false);
  add(call.accesses, to, true);
  auto host = to.is_cuda() ? on_host(to) : to;
  host.copy_(from.is_cuda() ? on_host(from) : from);
  auto& other = to.is_cuda() ? from : to;
  bool pageable = crosses && !is_pinned(other.const_data_ptr());
  std::string name = !crosses ? "aten::copy_" : to.is_cuda() ? "copy to the device" : "copy to the host";
  launch(name, call.accesses, current);
  if (crosses && (blocks || pageable)) wait_for_stream(current, (pageable ? "pageable " : "page-locked ") + name);
  torch::jit::push(*stack, to);
}
at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}
at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
const at::Tensor& resize(const at::Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  auto bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_whole(at::Tensor& self, Storage source) {
  int64_t length = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {length}, {1});
}
at::Tensor& set_nothing(at::Tensor& self) { return set_storage(self, stored(0), 0, {0}, {1}); }
void record_stream(at::Tensor& self, Stream stream) {
  if (auto* block = block_of(self.storage())) note({RECORD_STREAM, block->id, stream.id()});
}
bool pinned(const at::Tensor& self, std::optional<Device>) { return is_pinned(self.storage().data()); }

torch::Library* library = nullptr;
template <typename F> void own(const char* name, F* function) {
  library->impl(name, torch::CppFunction::makeFromUnboxedFunction(function));
}
} // namespace

extern "C" {
// From now on this process has a CUDA device, and it is this one.
void recorded_install() {
  static Guard guard;
  static Hooks hooks;
  impl::device_guard_impl_registry[(size_t)CUDA].store(&guard);
  SetAllocator(CUDA, &memory, 255);
  // torch keeps a reference to the hooks that it found first: they get the functions of ours
  *(void**)&at::detail::getCUDAHooks() = *(void**)&hooks;
  library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  own("empty.memory_format", empty);
  own("empty_strided", empty_strided);
  own("resize_", resize);
  own("set_.source_Storage_storage_offset", set_storage);
  own("set_.source_Tensor", set_tensor);
  own("set_.source_Storage", set_whole);
  own("set_", set_nothing);
  own("record_stream", record_stream);
  const std::vector<std::string> ours{"aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::record_stream", "aten::copy_", "aten::is_pinned"};
  library->impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  auto kernels = Dispatcher::singleton().getAllOpNamesForDispatchKey(DispatchKey::CPU);
  for (auto& name : Dispatcher::singleton().getAllOpNamesForDispatchKey(DispatchKey::CUDA))
    if (!Dispatcher::singleton().findOp(name)->hasKernelForDispatchKey(DispatchKey::CPU)) kernels.push_back(name);
  for (auto& name : kernels) {
    if (name.name.rfind("aten::", 0) != 0 || name.name == "aten::set_") continue;
    auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (std::find(ours.begin(), ours.end(), full) != ours.end()) continue;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}
void recorded_record(bool on) { std::lock_guard<std::mutex> guard(mutex); recording = on; }
void recorded_clear() { std::lock_guard<std::mutex> guard(mutex); words.clear(); }
// Copies at most `room` words of the log; returns how many there are.
int64_t recorded_log(int64_t* to, int64_t room) {
  std::lock_guard<std::mutex> guard(mutex);
  if ((int64_t)words.size() <= room) std::copy(words.begin(), words.end(), to);
  return words.size();
}
const char* recorded_name(int64_t id) {
  std::lock_guard<std::mutex> guard(mutex);
  return id < (int64_t)names.size() ? names[id].c_str() : nullptr;
}
void recorded_note(const char* name) { note_named(NOTE, {}, name); }
int64_t recorded_stream(int64_t next) { auto before = current; if (next >= 0) current = next; return before; }
int64_t recorded_new_stream() { return streams++; }
int64_t recorded_event(int64_t stream) { auto id = events++; note({RECORD, stream, id}); return id; }
void recorded_wait(int64_t event, int64_t stream) { note({WAIT, stream, event}); }
void recorded_host_wait(int64_t event, const char* name) { note_named(HOST_EVENT, {event}, name); }
void recorded_synchronize() { wait_for_device(); }
// cudaHostRegister: returns its error, and keeps it.
int64_t recorded_lock(int64_t address, int64_t bytes) {
  if (refused) return error = refused.load();
  lock((void*)address, bytes, blocks++, REGISTERED);
  return 0;
}
void recorded_stall(bool on) { stalled = on; }
void recorded_refuse(int64_t with) { refused = with; }
// cudaHostUnregister
int64_t recorded_unlock(int64_t address) { return unlock((void*)address) ? 0 : 713; }
int64_t recorded_bytes(bool most) { return most ? peak : allocated; }
void recorded_reset_peak() { peak = allocated.load(); }
}

namespace {
// The CPU's tensor of the same memory; a kernel of a name, on the current stream; what the host does
// by itself; storage's size.
at::Tensor host(const at::Tensor& tensor) { return tensor.is_cuda() ? on_host(tensor) : tensor; }
void use(const std::string& name, at::TensorList read, at::TensorList written, int64_t stream) {
  std::vector<Access> accesses;
  for (auto& each : read) add(accesses, each, false);
  for (auto& each : written) add(accesses, each, true);
  launch(name, accesses, stream);
}
void launched(std::string name, at::TensorList read, at::TensorList written) { use(name, read, written, current); }
void used_by_host(std::string name, at::TensorList read, at::TensorList written) { use(name, read, written, HOST); }
void resized(const at::Tensor& tensor, int64_t bytes) { resize_storage(tensor.storage(), bytes); }
} // namespace
TORCH_LIBRARY(recorded, m) {
  m.def("host(Tensor tensor) -> Tensor", torch::CppFunction::makeFromUnboxedFunction(host));
  m.def("launch(str name, Tensor[] read, Tensor[] written) -> ()", torch::CppFunction::makeFromUnboxedFunction(launched));
  m.def("host_use(str name, Tensor[] read, Tensor[] written) -> ()", torch::CppFunction::makeFromUnboxedFunction(used_by_host));
  m.def("resize(Tensor tensor, int bytes) -> ()", torch::CppFunction::makeFromUnboxedFunction(resized));
}
