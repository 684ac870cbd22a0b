// Files that a planner page takes: the times of stages (stages.json of a trace, or what --times
// takes), a plan, or a schedule as JSON. What is wrong is told in one line.
const MOST_BYTES = 64e6, MOST_PASSES = 400000;

const isObject = value => value !== null && typeof value === 'object' && !Array.isArray(value);
const isNumber = value => typeof value === 'number' && Number.isFinite(value) && value >= 0;
const isWhole = value => Number.isInteger(value) && value >= 0;

function require(holds, text) {
  if (!holds) throw new Error(text);
}

// {costs, schedule or null, units} of a file's text.
function readFile(text) {
  require(text.length <= MOST_BYTES, `${text.length} bytes: give at most ${MOST_BYTES}`);
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error('not JSON: give the stages.json of a trace, or a plan of zbpp plan -o FILE');
  }
  require(isObject(data), 'not one JSON object: give the stages.json of a trace, or a plan');
  if ('schedule' in data || 'format' in data) return readPlan(data);
  require('F' in data || 'times' in data,
    'neither times of stages ("F": [...], "B": [...], "W": [...]) nor a schedule: give the stages.json of a trace, or a plan');
  return {costs: readCosts(data), schedule: null};
}

// Fields of `Costs`, as `ir.costs_file` reads them; `inPage` are those that the page simulates.
function readCosts(data) {
  const inPage = ['times', 'amounts', 'F', 'B', 'W', 'activation', 'retained', 'parameters', 'comm',
    'message', 'edges', 'hops', 'speeds', 'together', 'pairs', 'layout', 'routes'];
  const unknown = Object.keys(data).filter(name => !inPage.includes(name));
  require(!unknown.length, `"${unknown[0]}" is not simulated in this page: leave it out, or use zbpp compare`);
  const numbers = (name, values, length, above = 0) => {
    require(Array.isArray(values) && values.length && values.every(x => isNumber(x) && x >= above),
      `${name} is not a list of numbers from 0 up: give one per stage`);
    require(!length || values.length === length, `${name} has ${values.length} entries and F ${length}: give one per stage`);
    return values;
  };
  for (const name of ['times', 'amounts']) require(!(name in data) || isObject(data[name]), `${name} is not an object: give lists by name`);
  const times = {...data.times, F: data.F ?? data.times?.F, B: data.B ?? data.times?.B, W: data.W ?? data.times?.W};
  const amounts = {...data.amounts, activation: data.activation ?? data.amounts?.activation, retained: data.retained ?? data.amounts?.retained};
  for (const name of Object.keys(times)) require('FBW'.includes(name), `times of ${name} are not simulated in this page: leave them out, or use zbpp compare`);
  for (const kind of ['F', 'B', 'W']) require(times[kind] !== undefined, `the times of ${kind} are missing: give "${kind}": [...]`);
  const stages = numbers('F', times.F).length, zeros = Array(stages).fill(0);
  const found = [times.F, numbers('B', times.B, stages), numbers('W', times.W, stages)];
  require(total(found.flat()) > 0, 'all times are 0: give a time above 0');
  for (const name of ['comm', 'message']) require(isNumber(data[name] ?? 0), `${name} = ${data[name]} is not a time: give a number from 0 up`);
  require((data.together ?? 1) > 0 && isNumber(data.together ?? 1), `together = ${data.together} is not a share: give a number above 0`);
  const pairs = data.pairs ?? {};
  require(isObject(pairs) && Object.entries(pairs).every(([name, share]) => ['FF', 'FW'].includes(name) && isNumber(share) && share > 0),
    'pairs are not shares: give FF, FW or both, numbers above 0');
  const speeds = data.speeds ?? [];
  require(Array.isArray(speeds) && speeds.every(x => isNumber(x) && x > 0), 'speeds are not a list of numbers above 0: give one per rank');
  const edges = data.edges ?? [];
  require(Array.isArray(edges) && edges.every(edge => Array.isArray(edge) && edge.length === 3 && isWhole(edge[0]) && isWhole(edge[1]) && isNumber(edge[2])),
    'edges are not a list of [sender, receiver, latency]');
  const hops = data.hops ?? [];
  require(Array.isArray(hops) && hops.every(hop => Array.isArray(hop) && hop.length === 2 && hop.every(isNumber)) && (!hops.length || hops.length === stages - 1),
    `hops are not a list of [forward, back]: give one for each of the ${stages - 1} stages before the last`);
  const activation = amounts.activation?.length ? numbers('activation', amounts.activation, stages) : null;
  const retained = amounts.retained?.length ? numbers('retained', amounts.retained, stages) : activation;
  const parameters = data.parameters?.length ? numbers('parameters', data.parameters, stages) : zeros;
  return {times: found, activation, retained, parameters, comm: data.comm ?? 0, message: data.message ?? 0,
    edges, hops, speeds, together: data.together ?? 1, pairs};
}

function readPlan(data) {
  const made = 'schedule' in data ? data.schedule : data;
  require(isObject(made) && String(made.format).startsWith('megatron_zbpp.schedule/') && isObject(made.placement),
    'not a schedule: no "format": "megatron_zbpp.schedule/2" in it; give a plan of zbpp plan -o FILE');
  const others = (Array.isArray(made.techniques) ? made.techniques : []).map(([name]) => name);
  require(!others.length, `a schedule with ${others.join(', ')}: this page simulates F, B and W of whole sequences; use zbpp convert --file FILE -o FILE.html`);
  const {ranks, opposite, route} = made.placement, m = made.num_microbatches;
  const routes = opposite?.length ? [ranks, opposite] : [ranks];
  require(routes.every(own => Array.isArray(own) && own.length === ranks.length && own.every(isWhole)), 'placement: give the rank of each stage');
  require(isWhole(m) && m > 0, `num_microbatches = ${m}: give a whole number from 1 up`);
  const p = Math.max(...ranks) + 1;
  require(Array.isArray(made.passes) && made.passes.length === p && made.passes.every(order => typeof order === 'string'),
    `passes: give the order of each of ${p} ranks`);
  const schedule = {name: String(made.name), ranks: p, m, stages: ranks.length, routes, route: route?.length ? route : [0]};
  require(schedule.route.every(way => isWhole(way) && way < routes.length), 'route: give the route of each microbatch');
  schedule.orders = made.passes.map(readOrder);
  schedule.chunks = Math.max(...schedule.orders.map((_, rank) => slotsOf(schedule, rank).length / routes.length));
  requireComplete(schedule);
  const costs = data.costs ? readCosts(data.costs) : null;
  if (costs) {
    require(costs.times[F].length === schedule.stages, `costs of ${costs.times[F].length} stages, but a schedule of ${schedule.stages}: give one entry per stage`);
    require(!costs.speeds.length || costs.speeds.length === p, `${costs.speeds.length} speeds, but ${p} ranks: give one each`);
  }
  return {costs, schedule, bytes: data.units?.memory === 'bytes'};
}

function readOrder(text) {
  const order = {kinds: [], stages: [], microbatches: [], together: []};
  for (const entry of text.split(/\s+/).filter(Boolean)) {
    const own = /^\(.*\)$/.test(entry) ? entry.slice(1, -1).split('&') : [entry];
    own.forEach((pass, at) => {
      const found = /^(\d+)([A-Z]+)(\d+)$/.exec(pass);
      require(found && KINDS.includes(found[2]), `"${pass.slice(0, 40)}" is no pass of this page: it has F, B, W and BW, such as 3F1`);
      order.kinds.push(KINDS.indexOf(found[2]));
      order.stages.push(Number(found[1]));
      order.microbatches.push(Number(found[3]));
      order.together.push(at + 1 < own.length);
    });
  }
  return order;
}

// Raises unless each stage has F, and B and W or both in one, of each microbatch once, on its rank.
function requireComplete(schedule) {
  const {m, stages, orders} = schedule, passes = total(orders.map(order => order.kinds.length));
  require(passes <= MOST_PASSES, `${passes} passes: this page takes up to ${MOST_PASSES}; use zbpp convert --file FILE -o FILE.html`);
  const done = [F, B, W].map(() => new Uint8Array(stages * m));
  orders.forEach(({kinds, stages: own, microbatches}, rank) => kinds.forEach((kind, at) => {
    const stage = own[at], microbatch = microbatches[at], name = stage + KINDS[kind] + microbatch;
    require(stage < stages && microbatch < m, `${name} of rank ${rank}: there are ${stages} stages and ${m} microbatches`);
    require(rankOf(schedule, stage, microbatch) === rank, `${name} is on rank ${rank}, but its stage on rank ${rankOf(schedule, stage, microbatch)}`);
    for (const each of kind === BW ? [B, W] : [kind]) {
      require(!done[each][stage * m + microbatch]++, `${name} of rank ${rank} comes twice`);
    }
  }));
  done.forEach((own, kind) => {
    const at = own.indexOf(0);
    require(at < 0, `${Math.floor(at / m)}${KINDS[kind]}${at % m} is missing: each stage has F, B and W of each microbatch`);
  });
  const {ends} = simulate(schedule, uniformCosts(schedule, [1, 1, 1], 0));
  const stuck = ends.findIndex((own, rank) => own.length < orders[rank].kinds.length);
  require(stuck < 0, `deadlock: rank ${stuck} cannot go on after ${ends[stuck]?.length} passes; zbpp check says what it waits for`);
}
