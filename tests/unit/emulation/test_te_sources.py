"""What mcore/te.py takes for granted is what Transformer Engine's own sources say.

Read, not imported: that needs a GPU's libraries. Where the package is not installed, its wheel is
downloaded, which holds the Python sources and builds nothing.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import VERSIONS, transformer_engine

LINEAR = {
    'Linear': 'linear.py',
    'LayerNormLinear': 'layernorm_linear.py',
    'LayerNormMLP': 'layernorm_mlp.py',
    'GroupedLinear': 'grouped_linear.py',
}
each_module = pytest.mark.parametrize('name', LINEAR)


@pytest.fixture(scope='session', params=VERSIONS)
def folder(request):
    """Where TE's modules are, as sources."""
    return transformer_engine(request.param) / 'transformer_engine' / 'pytorch' / 'module'


def classes(file: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(file.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef)}


def backward_dw(folder: Path, name: str) -> ast.FunctionDef:
    """The class's own, or its base's."""
    base = methods(classes(folder / 'base.py')['TransformerEngineBaseModule'])
    return (base | methods(classes(folder / LINEAR[name])[name]))['backward_dw']


def calls(tree: ast.AST, ending: str) -> list[ast.Call]:
    """Calls of something whose source ends so."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in found if ast.unparse(call.func).endswith(ending)]


def test_store(folder):
    store = methods(classes(folder / '_common.py')['WeightGradStore'])
    assert {'put', 'pop', 'delay_wgrad_compute'} <= set(store)
    given = [argument.arg for argument in store['__init__'].args.args]
    assert given == ['self', 'delay_wgrad_compute', 'ub_bulk_wgrad']
    assert 'self.context = queue.Queue()' in ast.unparse(store['__init__']), 'first in, first out'
    assert 'self.context.put(' in ast.unparse(store['put'])
    assert 'self.context.get()' in ast.unparse(store['pop'])
    assert ast.unparse(store['delay_wgrad_compute']).endswith('return self.enabled')
    assert 'self.context.put([tensor_list, func])' in ast.unparse(store['put']), 'as te.py puts it'


@each_module
def test_constructor(folder, name):
    constructor = methods(classes(folder / LINEAR[name])[name])['__init__']
    arguments = constructor.args
    assert 'delay_wgrad_compute' in {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
    assert 'self.wgrad_store = WeightGradStore(delay_wgrad_compute' in ast.unparse(constructor)


@each_module
def test_parameters(folder, name):
    """Those whose names do not speak of layer_norm are weights and biases that W computes."""
    module = classes(folder / LINEAR[name])[name]
    literal = {
        call.args[0].value
        for call in calls(module, 'self.register_parameter')
        if isinstance(call.args[0], ast.Constant)
    }
    norms = {parameter for parameter in literal if 'layer_norm' in parameter}
    assert bool(norms) == name.startswith('LayerNorm')
    assert norms <= {'layer_norm_weight', 'layer_norm_bias'}
    fc = {f'fc{k}_{what}' for k in (1, 2) for what in ('weight', 'bias')}
    assert literal - norms == (fc if name == 'LayerNormMLP' else literal & {'weight', 'bias'})
    said = ast.unparse(methods(module)['__init__'])
    if name == 'GroupedLinear':
        assert "f'weight{i}'" in said and "f'bias{i}'" in said
    elif name != 'LayerNormMLP':
        assert 'self.weight_names' in said and 'self.bias_names' in said


@each_module
def test_one_backward_dw_takes_what_one_backward_queued(folder, name):
    """LayerNormMLP two, the others one; te.py tells them by `fc2_weight`."""
    tree = ast.parse((folder / LINEAR[name]).read_text())
    backwards = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and calls(node, 'wgrad_store.put')
    ]
    assert backwards, 'backward puts'
    entries = 2 if name == 'LayerNormMLP' else 1
    assert {len(calls(node, 'wgrad_store.put')) for node in backwards} == {entries}
    run = backward_dw(folder, name)
    # of the fc1 entry in two branches, with a bias and without
    assert len(calls(run, 'self.wgrad_store.pop')) == (3 if entries == 2 else 1)
    assert ("'fc2_weight'" in ast.unparse(tree)) == (entries == 2)


@each_module
def test_backward_dw_leaves_a_bias_gradient_that_is_there(folder, name):
    """So that one which B has computed under FP8 is not asked for again."""
    run = backward_dw(folder, name)
    guarded = [
        node
        for node in ast.walk(run)
        if isinstance(node, ast.If) and 'bias' in (test := ast.unparse(node.test))
        if '.grad is None' in test
    ]
    assert guarded, ast.unparse(run)
    set_at = [
        node.lineno
        for node in ast.walk(run)
        if isinstance(node, ast.Assign) and 'bias' in ast.unparse(node.targets[0])
        if ast.unparse(node.targets[0]).endswith('.grad')
    ]
    assert set_at
    assert all(any(g.lineno < line <= g.end_lineno for g in guarded) for line in set_at)


@each_module
def test_fused_gradients_are_marked(folder, name):
    """B sets the flag of Megatron's DistributedDataParallel, and shows autograd a stand-in."""
    tree = ast.parse((folder / LINEAR[name]).read_text())
    marked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        if ast.unparse(node.body[0]).endswith('.grad_added_to_main_grad = True')
    ]
    assert marked
    assert all(calls(node, 'get_dummy_wgrad') + calls(node, 'torch.empty') for node in marked)
    assert 'fuse_wgrad_accumulation' in ast.unparse(backward_dw(folder, name))
    assert 'zero_out_wgrad' in ast.unparse(tree)


@each_module
def test_hooks_of_ddp_are_known_by_name(folder, name):
    base = classes(folder / 'base.py')['TransformerEngineBaseModule']
    assert 'self.wgrad_accumulation_and_reduce_hooks = []' in ast.unparse(methods(base)['__init__'])
    assert 'hook' in ast.unparse(backward_dw(folder, name))


@pytest.mark.parametrize('name', ['Linear', 'LayerNormLinear', 'LayerNormMLP'])
def test_userbuffers_cannot_be_delayed(folder, name):
    """Which is why `tp_comm_overlap` is refused."""
    said = (folder / LINEAR[name]).read_text()
    assert 'Delayed weight grad computation is not supported' in said
    assert 'Userbuffers' in said


PROGRAM = """
import torch

def double(x):
    return torch.sin(x) * 2

before = torch.compile(double)
import megatron_zbpp
assert megatron_zbpp.device().type == 'cpu'
after = torch.compile(double)
x = torch.randn(8)
assert torch.equal(before(x), double(x)) and torch.equal(after(x), double(x))
"""


@pytest.mark.parametrize('disabled', ['', '0'])
def test_compiled_functions_run(monkeypatch, disabled):
    """Those from before `device()`, too; and where the environment asks for the compiler."""
    monkeypatch.setenv('TORCHDYNAMO_DISABLE', disabled)
    if not disabled:
        monkeypatch.delenv('TORCHDYNAMO_DISABLE')
    done = subprocess.run([sys.executable, '-c', PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
