// The planner page: state, table, timelines, link. The state is {p, m, v, F, B, W, comm, limit,
// show, file}; the fragment of the address says all of it.
const page = JSON.parse(document.getElementById('data').textContent);
const {sizes, families, palette} = page;
const byId = id => document.getElementById(id);
const RIVAL = '1f1b', BAR_TOP = 0.06, BAR_HEIGHT = 0.5, FLOOR = 0.97;  // as in svg.py
const ROW_HEIGHTS = [[4, 40], [8, 32], [16, 25], [Infinity, 16]];  // up to so many ranks, so many pixels
const CONTROLS = [
  {id: 'p', text: 'p, ranks', steps: sizes.ranks},
  {id: 'm', text: 'm, microbatches', steps: sizes.microbatches},
  {id: 'v', text: 'v, chunks of a rank', steps: sizes.chunks},
  {id: 'F', text: 'F, time of a forward', most: 4, step: 0.05},
  {id: 'B', text: 'B, input gradient', most: 4, step: 0.05},
  {id: 'W', text: 'W, weight gradient', most: 4, step: 0.05},
  {id: 'comm', text: 'time of a message', most: 1, step: 0.01},
  {id: 'limit', text: 'memory limit'},
];
const near = (steps, wanted) => steps.includes(wanted) ? wanted : steps[Math.floor((steps.length - 1) / 2)];
const defaults = () => ({
  p: near(sizes.ranks, 8), m: near(sizes.microbatches, 24), v: near(sizes.chunks, 2),
  F: 1, B: 1, W: 1, comm: 0, limit: null, show: [RIVAL, 'zb-h1', 'zb-v'], file: null,
});
let state = defaults(), schedules = new Map(), linkTimer = 0;
const inputs = {}, rows = new Map();

async function streamed(bytes, stream) {
  return new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer();
}
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new TextDecoder().decode(await streamed(bytes, new DecompressionStream('deflate-raw')));
}
async function packedText(text) {
  const bytes = new Uint8Array(await streamed(new TextEncoder().encode(text), new CompressionStream('deflate-raw')));
  let letters = '';
  for (const byte of bytes) letters += String.fromCharCode(byte);
  return btoa(letters).replaceAll('+', '-').replaceAll('/', '_').replaceAll('=', '');
}

// Schedules

const keyOf = (name, chunks, p, m) => [name, chunks, p, m].join('\t');
function index(text) {
  schedules = new Map(text.split('\n').map(line => [line.split('\t', 4).join('\t'), line]));
}
function scheduleOf(name, chunks, p, m) {
  const key = keyOf(name, chunks, p, m), found = schedules.get(key);
  if (typeof found === 'string') schedules.set(key, decoded(found));
  return schedules.get(key);
}
// The family's schedule of so many chunks; of others where it cannot have those.
function ofFamily(name, v, p, m) {
  return [v, ...sizes.chunks, 1, 2].map(chunks => scheduleOf(name, chunks, p, m)).find(Boolean);
}

const planOf = () => state.file && state.file.schedule;
const sizesNow = () => planOf() ? {p: planOf().ranks, m: planOf().m} : {p: state.p, m: state.m};

// Costs of a schedule's stages; null: those of the file do not become so many.
function costsOf(schedule, own) {
  const uniform = uniformCosts(schedule, [state.F, state.B, state.W], state.comm);
  const file = state.file && state.file.costs;
  if (!file) return uniform;
  const filled = {...file, comm: state.comm, activation: file.activation || file.times[F].map(() => 0), retained: file.retained || file.times[F].map(() => 0)};
  const costs = own ? filled : joinedCosts(filled, schedule.stages);
  if (!costs) return null;
  return file.activation ? costs : {...costs, activation: uniform.activation, retained: file.retained ? costs.retained : uniform.retained};
}

function ran(name, schedule, own = false) {
  const costs = costsOf(schedule, own);
  if (!costs) return null;
  const run = simulate(schedule, costs), memory = memoryOf(run), held = schedule.orders.map(() => 0);
  schedule.routes.forEach(ranks => ranks.forEach((rank, stage) => { held[rank] += costs.parameters[stage]; }));
  const whole = Math.max(...memory.peaks.map((peak, rank) => peak + held[rank]));
  return {name, run, memory, figures: figuresOf(run), peak: Math.max(...memory.peaks), whole};
}

// All that are simulated, by name, and the names of those that are not.
function simulated() {
  const {p, m} = sizesNow(), found = new Map(), without = [];
  const speeds = state.file && state.file.costs ? state.file.costs.speeds.length : 0;
  if (planOf()) found.set(state.file.label, ran(state.file.label, planOf(), Boolean(state.file.costs)));
  for (const {name} of families) {
    const schedule = ofFamily(name, state.v, p, m);
    const result = schedule && (!speeds || speeds === p) ? ran(name, schedule) : null;
    if (result) found.set(name, result); else without.push(name);
  }
  return {found, without, speeds};
}

// Controls

const inGiB = () => Boolean(state.file && (state.file.bytes || (state.file.costs && state.file.costs.activation && Math.max(...state.file.costs.activation) >= page.many)));
const amount = value => inGiB() ? show(value / 2 ** 30) + ' GiB' : show(value);
const fromAmount = value => inGiB() ? value * 2 ** 30 : value;

function addControls() {
  byId('controls').innerHTML = CONTROLS.map(({id, text, steps, most, step}) => `<div class="control">
    <label for="${id}">${text}</label>${steps ? `<output id="${id}-exact" for="${id}"></output>`
    : `<input type="number" id="${id}-exact" min="0" step="any" aria-label="${text}, as a number"${id === 'limit' ? ' placeholder="none"' : ''}>`}
    <input type="range" id="${id}" min="0" max="${steps ? steps.length - 1 : most || 1}" step="${steps ? 1 : step || 'any'}"></div>`).join('');
  for (const {id, steps} of CONTROLS) {
    const slider = inputs[id] = byId(id), exact = byId(id + '-exact');
    slider.addEventListener('input', () => {
      const value = Number(slider.value);
      set(id, steps ? steps[value] : id === 'limit' ? (value >= Number(slider.max) ? null : fromAmount(Number(value.toPrecision(3)))) : value);
    });
    if (!steps) exact.addEventListener('change', () => {
      if (exact.value === '' && id === 'limit') return set(id, null);
      const value = Number(exact.value);
      if (exact.value === '' || !isNumber(value) || value > 1e9) return complain(`${id} = ${exact.value || 'nothing'}: give a number from 0 up to 1e9`);
      set(id, id === 'limit' ? fromAmount(value) : value);
    });
  }
  byId('controls').addEventListener('submit', event => event.preventDefault());
}

function set(id, value) {
  const next = {...state, [id]: value};
  if (!state.file && next.F + next.B + next.W === 0) return complain('F, B and W are all 0: give a time above 0');
  state = next;
  complain('');
  update();
}

function showControls(found) {
  const plan = planOf(), timed = state.file && state.file.costs;
  const now = {...state, ...(plan ? {p: plan.ranks, m: plan.m} : {})};
  for (const {id, steps, most} of CONTROLS) {
    const slider = inputs[id], exact = byId(id + '-exact');
    slider.disabled = exact.disabled = Boolean((plan && (id === 'p' || id === 'm')) || (timed && 'FBW'.includes(id)));
    if (steps) {
      slider.value = Math.max(0, steps.indexOf(now[id]));
      slider.setAttribute('aria-valuetext', now[id]);
      exact.textContent = now[id];
    } else if (id === 'limit') {
      const highest = Math.max(...[...found.values()].map(each => each.whole), state.limit || 0);
      const unit = inGiB() ? 2 ** 30 : 1;
      slider.max = highest / unit || 1;
      slider.value = (state.limit === null ? highest : state.limit) / unit;
      slider.setAttribute('aria-valuetext', state.limit === null ? 'none' : amount(state.limit));
      exact.value = state.limit === null ? '' : Number((state.limit / unit).toPrecision(6));
    } else {
      const usual = id === 'comm' && timed ? total(state.file.costs.times[F]) / sizesNow().p || 1 : most;
      slider.max = Math.max(usual, now[id]);
      slider.step = id === 'comm' && timed ? 'any' : CONTROLS.find(each => each.id === id).step;
      slider.value = now[id];
      exact.value = slider.disabled ? '' : now[id];
      exact.placeholder = slider.disabled ? 'file' : '';
    }
  }
}

// Table

function rowOf(name) {
  if (rows.has(name)) return rows.get(name);
  const family = families.find(each => each.name === name), tr = document.createElement('tr');
  tr.innerHTML = '<th scope="row"><label><input type="checkbox"><span></span></label></th>' + '<td></td>'.repeat(4);
  tr.querySelector('th').title = family ? family.summary : 'the plan of the file';
  tr.querySelector('input').addEventListener('change', event => {
    const others = state.show.filter(other => other !== name);
    set('show', event.target.checked ? [...others, name] : others);
  });
  rows.set(name, tr);
  return tr;
}

const within = each => state.limit === null || each.whole <= state.limit * (1 + 1e-9);
const gainOf = (each, rival) => rival ? 1 - each.figures.makespan / rival.figures.makespan : null;
const percent = share => (100 * share).toFixed(1) + '%';
const sorted = found => [...found.values()].sort((a, b) => within(b) - within(a)
  || (Math.abs(a.figures.makespan - b.figures.makespan) > 1e-9 * a.figures.makespan ? a.figures.makespan - b.figures.makespan : a.whole - b.whole));

function showTable(found) {
  const rival = found.get(RIVAL), wanted = sorted(found).map(each => {
    const tr = rowOf(each.name), gain = gainOf(each, rival), chunks = each.run.schedule.chunks;
    tr.querySelector('span').textContent = each.name + (chunks > 1 ? ` v=${chunks}` : '');
    tr.querySelector('input').checked = state.show.includes(each.name);
    tr.classList.toggle('over', !within(each));
    const cells = [show(each.figures.makespan), gain === null ? '–' : percent(gain), percent(each.figures.idle),
      amount(each.peak) + (within(each) ? '' : ' > limit')];
    tr.querySelectorAll('td').forEach((td, at) => { td.textContent = cells[at]; });
    return tr;
  });
  const body = byId('rows');
  if (wanted.length !== body.children.length || wanted.some((tr, at) => body.children[at] !== tr)) body.replaceChildren(...wanted);
}

function showBest(found, without, speeds) {
  const rival = found.get(RIVAL), {p, m} = sizesNow();
  const best = sorted(found).find(each => within(each) && each.run.schedule.routes.length === 1);
  const limited = state.limit === null ? '' : ` within ${amount(state.limit)}`;
  const gain = best && gainOf(best, rival), than = gain === null ? '' : `, ${percent(Math.abs(gain))} ${gain >= 0 ? 'less' : 'more'} time than ${RIVAL}`;
  byId('best').innerHTML = best
    ? `Shortest${limited}: <b>${escape(best.name)}</b> takes ${show(best.figures.makespan)}${best.name === RIVAL ? '' : than}; idle GPU time ${percent(best.figures.idle)}, peak memory ${amount(best.peak)}`
    : `No schedule stays${limited || ' for these sizes'}`;
  const notes = [];
  if (speeds && speeds !== p) notes.push(`The file has speeds of ${speeds} ranks: set p to ${speeds}.`);
  if (planOf() && !rival) notes.push(`This page has no other schedules of p = ${p}, m = ${m}: zbpp page --pp ${p} --microbatches ${m} -o FILE makes one that has.`);
  else if (without.length) notes.push(`Not for these sizes or stages: ${without.join(', ')}.`);
  const named = test => families.filter(test).map(each => each.name).filter(name => found.has(name)).join(', ');
  const fitted = named(each => each.fitted), copies = named(each => each.copies > 1);
  if (fitted) notes.push(`Orders made for F = B = W and no message time, which zbpp plan and zbpp compare fit to yours: ${fitted}.`);
  if (copies) notes.push(`Two copies of the weights on the ranks together: ${copies}.`);
  notes.push(`Gain: time saved against ${RIVAL}; ${page.meaning}.` + (inGiB() ? '' : ' Memory: activations of one microbatch on a full rank.'));
  byId('notes').textContent = notes.join(' ');
}

// Timelines

const shadesOf = schedule => schedule.routes.length > 1 ? 2 : schedule.chunks;
const colourOf = (kind, shade, shades) => palette[kind][shades > 1 ? Math.round(shade * (palette[kind].length - 1) / (shades - 1)) : 0];

function chunksOf(schedule) {
  const seen = {};
  return schedule.routes[0].map(rank => seen[rank] = (seen[rank] ?? -1) + 1);
}

// For each pass before which its rank idled, (rank, index) of the pass it waited for.
function waitsOf({schedule, starts, ends}, makespan) {
  const where = [F, B].map(() => []);
  schedule.orders.forEach(({kinds, stages, microbatches}, rank) => kinds.forEach((kind, at) => {
    if (kind !== W) where[kind === F ? F : B][stages[at] * schedule.m + microbatches[at]] = [rank, at];
  }));
  return schedule.orders.map(({kinds, stages, microbatches}, rank) => kinds.map((kind, at) => {
    if (starts[rank][at] <= (at ? ends[rank][at - 1] : 0) + 1e-9 * makespan) return [-1, -1];
    const needed = needsOf(schedule, kind, stages[at]).map(([row, stage]) => where[row][stage * schedule.m + microbatches[at]]);
    const others = needed.filter(([other]) => other !== rank);
    return others.reduce((last, each) => last[0] < 0 || ends[each[0]][each[1]] > ends[last[0]][last[1]] ? each : last, [-1, -1]);
  }));
}

function panelOf({name, run, memory, figures}) {
  const {schedule, starts, ends} = run, shades = shadesOf(schedule), chunks = chunksOf(schedule);
  const waits = waitsOf(run, figures.makespan), [, height] = ROW_HEIGHTS.find(([most]) => schedule.ranks <= most);
  const inks = Object.fromEntries(KINDS.map(kind => [kind, Array.from({length: shades}, (_, shade) => colourOf(kind, shade, shades)[1])]));
  return {
    name, row: height, bar: BAR_HEIGHT, chunks, inks, same: name, route: schedule.routes.length > 1 ? schedule.route : null,
    rows: schedule.orders.map(({kinds, stages, microbatches}, rank) => ({
      rank, kinds: kinds.map(kind => KINDS[kind]), stages, microbatches, slices: kinds.map(() => 0), starts: starts[rank],
      ends: ends[rank], waits: waits[rank], live: inGiB() ? null : memory.live[rank], host: null, phases: [],
    })),
  };
}

// Bars, stripes and memory curves in the coordinates (time, rank), as `svg.shapes`.
function shapesOf({run, memory, figures}) {
  const {schedule, starts, ends} = run, shades = shadesOf(schedule), chunks = chunksOf(schedule), paths = {}, feet = {};
  schedule.orders.forEach(({kinds, stages, microbatches}, rank) => kinds.forEach((kind, at) => {
    const shade = schedule.routes.length > 1 ? schedule.route[microbatches[at] % schedule.route.length] : chunks[stages[at]];
    const [fill, ink] = colourOf(KINDS[kind], shade, shades), left = starts[rank][at], time = ends[rank][at] - left;
    (paths[fill] ??= []).push(`M${left} ${rank + BAR_TOP}h${time}v${BAR_HEIGHT}h${-time}z`);
    for (let k = 1; k <= page.stripes[KINDS[kind]]; k++) (feet[ink] ??= []).push(`M${left} ${rank + BAR_TOP + BAR_HEIGHT * (1 - 0.1 * k)}h${time}`);
  }));
  const idle = schedule.orders.map((_, rank) => `M0 ${rank + BAR_TOP}h${figures.makespan}v${BAR_HEIGHT}h${-figures.makespan}z`).join('');
  return `<path class="idle" d="${idle}"/><g class="passes">${Object.entries(paths).map(([fill, d]) => `<path fill="${fill}" d="${d.join('')}"/>`).join('')}</g>`
    + Object.entries(feet).map(([ink, d]) => `<path class="stripes" stroke="${ink}" d="${d.join('')}"/>`).join('')
    + `<path class="memory" d="${curvesOf(run, memory)}"/>`;
}

function curvesOf({schedule, costs, starts, ends}, {live, most, peaks}) {
  const highest = Math.max(...peaks) || 1, room = FLOOR - BAR_TOP - BAR_HEIGHT - 0.04;
  return live.map((own, rank) => {
    const {kinds, stages} = schedule.orders[rank], steps = [];
    let latest = 0, before = 0;
    const step = (time, held) => {
      if (steps.length && time - steps.at(-1)[0] <= 1e-12 * time) time = steps.pop()[0];
      steps.push([time, held]);
    };
    own.forEach((held, at) => {
      const start = starts[rank][at], end = ends[rank][at];
      if (most[rank][at] !== before && most[rank][at] !== held) {
        const [b, w] = [costs.times[B][stages[at]], costs.times[W][stages[at]]];
        step(start + (b / (b + w || 1)) * (end - start), most[rank][at]);
      }
      latest = Math.max(latest, kinds[at] === F ? start : end);
      step(latest, before = held);
    });
    const y = held => rank + FLOOR - room * held / highest;
    return steps.length ? `M${steps[0][0]} ${rank + FLOOR}${steps.map(([time, held]) => `H${time}V${y(held)}`).join('')}V${rank + FLOOR}z` : '';
  }).join('');
}

function sectionOf(each, panel, at, horizon) {
  const {figures, memory, run} = each, ranks = run.schedule.ranks, parts = idleParts(run, figures);
  const cause = Object.entries({schedule: parts.schedule, 'uneven stages': parts.stages, messages: parts.messages})
    .filter(([, share]) => share > 5e-4).map(([name, share]) => `${name} ${percent(share)}`).join(', ');
  const facts = `makespan ${show(figures.makespan)}, idle GPU time ${percent(figures.idle)}${cause && ` (${cause})`}, bubble ${percent(figures.bubble)}`;
  const texts = run.schedule.orders.map((_, rank) =>
    `<text class="quiet" text-anchor="end" x="${GUTTER - 10}" y="${(rank + BAR_TOP + BAR_HEIGHT / 2) * panel.row + 4}">rank ${rank}</text>`
    + (panel.row >= 20 ? `<text class="quiet peak" y="${(rank + FLOOR) * panel.row - 2}">max ${amount(memory.peaks[rank]).replace(' GiB', '')}</text>` : ''));
  return `<section><h2>${escape(each.name)}</h2><div class="facts">${facts}</div>
    <svg class="view" id="panel-${at}" height="${ranks * panel.row + AXIS}" role="img" aria-label="timeline of ${escape(each.name)}: ${facts}">${texts.join('')}
    <svg class="stretch" x="${GUTTER}" y="0" height="${ranks * panel.row}" preserveAspectRatio="none"><rect width="${horizon}" height="${ranks}" fill="transparent"/>${shapesOf(each)}</svg>
    <g class="axis"></g><g class="labels"></g><g class="marks"></g></svg></section>`;
}

function showPanels(found) {
  const drawn = sorted(found).filter(each => state.show.includes(each.name));
  const longest = Math.max(0, ...drawn.map(each => each.figures.makespan)) || 1, made = drawn.map(panelOf);
  byId('panels').innerHTML = drawn.map((each, at) => sectionOf(each, made[at], at, longest)).join('') || '<p class="soft">Tick schedules to draw them.</p>';
  showTimelines({horizon: longest, unit: '', meanings: page.meanings, panels: made});
  draw();
  const kindsOf = test => new Set(made.filter(test).flatMap(panel => panel.rows.flatMap(row => row.kinds)));
  const shown = {all: kindsOf(() => true), chunks: kindsOf(panel => !panel.route && Math.max(...panel.chunks) > 0), routes: kindsOf(panel => panel.route)};
  document.querySelectorAll('.legend li[data-kind]').forEach(entry => {
    const {when, kind} = entry.dataset, v = Number(when.split(' ').at(-1));  // as in 'chunk 2 of 4'
    entry.hidden = !(shown[when] ?? kindsOf(panel => !panel.route && Math.max(...panel.chunks) === v - 1)).has(kind);
  });
}

function update() {
  const {found, without, speeds} = simulated();
  showControls(found);
  showTable(found);
  showBest(found, without, speeds);
  showPanels(found);
  clearTimeout(linkTimer);  // browsers refuse hundreds of addresses in half a minute
  linkTimer = setTimeout(writeLink, 200);
}

// Files and links

const complain = text => { byId('trouble').textContent = text; };

function writeLink() {
  const {p, m, v, F: f, B: b, W: w, comm, limit, show: shown, file} = state;
  const fields = {p, m, v, F: f, B: b, W: w, comm, limit: limit ?? '', show: shown.join(','), ...(file ? {name: file.name, file: file.packed} : {})};
  history.replaceState(null, '', '#' + new URLSearchParams(fields));
}

async function opened(name, text) {
  const read = readFile(text), label = name.replace(/\.json$/, '') || 'plan';
  const shown = read.schedule ? `a plan of ${read.schedule.ranks} ranks, ${read.schedule.stages} stages, ${read.schedule.m} microbatches`
    : `times of ${read.costs.times[F].length} stages`;
  return {...read, name, packed: await packedText(text), shown,
    label: families.some(each => each.name === label) ? `${label} (file)` : label};
}

// The state with a file's: its message time, and p where the stages need another.
function withFile(file) {
  const next = {...state, file};
  if (file.costs) next.comm = file.costs.comm;
  if (file.schedule) next.show = [file.label, ...state.show.filter(name => name !== file.label)];
  else {
    const stages = file.costs.times[F].length, fits = p => stages % p === 0 && (!file.costs.speeds.length || file.costs.speeds.length === p);
    if (!fits(next.p)) next.p = sizes.ranks.filter(fits).pop() ?? next.p;
  }
  return next;
}

function closeFile() {
  const {file} = state, was = defaults();
  rows.delete(file && file.label);
  const shown = state.show.filter(name => !file || name !== file.label);
  state = {...state, file: null, limit: null, comm: was.comm, show: shown.length ? shown : was.show};
  complain('');
}

function showFile() {
  byId('close').hidden = !state.file;
  byId('opened').textContent = state.file ? `${state.file.name}: ${state.file.shown}` : '';
}

async function open(name, text) {
  try {
    const file = await opened(name, text);
    closeFile();
    state = withFile(file);
  } catch (error) {
    return complain(`${name}: ${error.message}`);
  }
  showFile();
  update();
}

// The state that a fragment says; raises where it says something that this page has not.
async function stateOf(fragment) {
  const said = new URLSearchParams(fragment), next = defaults();
  for (const {id, steps} of CONTROLS) {
    if (!said.has(id) || (id === 'limit' && said.get(id) === '')) continue;
    const value = Number(said.get(id));
    if (said.get(id) === '' || !isNumber(value) || (steps && !steps.includes(value) && !said.has('file'))) {
      throw new Error(`the link has ${id} = ${said.get(id)}: this page has ${steps ? steps.join(', ') : 'numbers from 0 up'}`);
    }
    next[id] = value;
  }
  if (said.has('file')) {
    let text;
    try {
      text = await unpacked(said.get('file').replaceAll('-', '+').replaceAll('_', '/'));
    } catch (error) {
      throw new Error('the file in the link is cut off: copy the whole link');
    }
    next.file = await opened(said.get('name') || 'file', text);
  }
  if (said.has('show')) {
    next.show = said.get('show').split(',').filter(Boolean);
    const unknown = next.show.filter(name => !families.some(each => each.name === name) && !(next.file && next.file.label === name));
    require(!unknown.length, `the link has ${unknown.join(', ')}: this page has ${families.map(each => each.name).join(', ')}`);
  }
  require(next.file || next.F + next.B + next.W > 0, 'the link has F, B and W of 0: give a time above 0');
  return next;
}

async function restore(fragment) {
  let next = defaults(), wrong = '';
  try {
    next = await stateOf(fragment.slice(1));
  } catch (error) {
    wrong = error.message;
  }
  if (state.file) rows.delete(state.file.label);
  state = next;
  complain(wrong);
  showFile();
  update();
}

async function start() {
  index(await unpacked(page.orders));
  addControls();
  byId('file').addEventListener('change', async event => {
    const [file] = event.target.files;
    if (file) open(file.name, await file.text());
    event.target.value = '';
  });
  document.addEventListener('dragover', event => event.preventDefault());
  document.addEventListener('drop', async event => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file) open(file.name, await file.text());
  });
  byId('close').onclick = () => { closeFile(); showFile(); update(); };
  byId('defaults').onclick = () => { closeFile(); state = defaults(); showFile(); update(); };
  byId('link').onclick = () => {
    writeLink();
    navigator.clipboard.writeText(location.href).then(() => { byId('link').textContent = 'link copied'; }, () => complain('the browser lets no page copy: the address bar has the link'));
  };
  // the address may be written anew before this event comes
  addEventListener('hashchange', event => restore(new URL(event.newURL).hash));
  await restore(location.hash);
  document.body.dataset.ready = 'yes';
}
start();
