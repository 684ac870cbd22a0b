// Orders, costs and their simulation, as schedules, ir.costs, analysis.simulator and
// analysis.memory have them: a test holds all numbers to theirs, times to the bit. A pass is a
// kind, a stage and a microbatch; pipelines are plain: F down the stages, B back up, W after its B.
const F = 0, B = 1, W = 2, BW = 3, KINDS = ['F', 'B', 'W', 'BW'], PENDING = -Infinity;
const FIRST_LETTER = 48, TOGETHER = '+';  // as in planner_page.py

const total = numbers => numbers.reduce((sum, x) => sum + x, 0);
const rankOf = (schedule, stage, microbatch) =>
  schedule.routes[schedule.route[microbatch % schedule.route.length]][stage];

// The stages of a rank, once for each route, in the order of their letters.
function slotsOf(schedule, rank) {
  return schedule.routes.flatMap((ranks, route) =>
    ranks.flatMap((own, stage) => own === rank ? [{route, stage}] : []));
}

// The schedule that `planner_page.encoded` wrote: of each stage microbatches come in their order.
function decoded(text) {
  const [name, chunks, ranks, m, routes, route, orders] = text.split('\t');
  const numbers = part => part.split(',').map(Number);
  const schedule = {
    name, chunks: Number(chunks), ranks: Number(ranks), m: Number(m),
    routes: routes.split(';').map(numbers), route: numbers(route),
  };
  schedule.stages = schedule.routes[0].length;
  schedule.orders = orders.split(' ').map((letters, rank) => decodedOrder(schedule, letters, rank));
  return schedule;
}

function decodedOrder(schedule, letters, rank) {
  const order = {kinds: [], stages: [], microbatches: [], together: []};
  const taken = route => [...Array(schedule.m).keys()].filter(i => schedule.route[i % schedule.route.length] === route);
  const slots = slotsOf(schedule, rank).map(({route, stage}) => {
    const own = taken(route);
    return {stage, forwards: own.values(), backwards: own.values(), split: []};
  });
  for (const letter of letters) {
    if (letter === TOGETHER) { order.together[order.kinds.length - 1] = true; continue; }
    const code = letter.charCodeAt(0) - FIRST_LETTER, kind = code % 4, slot = slots[code >> 2];
    const microbatch = kind === W ? slot.split.shift() : (kind === F ? slot.forwards : slot.backwards).next().value;
    if (kind === B) slot.split.push(microbatch);
    order.kinds.push(kind);
    order.stages.push(slot.stage);
    order.microbatches.push(microbatch);
    order.together.push(false);
  }
  return order;
}

// Costs of equal ranks, as `Costs.uniform`: times are of one full rank.
function uniformCosts(schedule, times, comm) {
  const route = schedule.routes[0], count = rank => route.filter(other => other === rank).length;
  const shares = route.map(rank => 1 / count(rank));
  return {times: times.map(time => shares.map(share => time * share)), activation: shares,
    retained: shares, parameters: shares.map(() => 0), comm, message: 0, edges: [], hops: [], speeds: [],
    together: 1, pairs: {}};
}

// Costs of as many stages of the same model, as `Costs.joined`; null: they do not join so.
function joinedCosts(costs, stages) {
  const own = costs.times[F].length;
  if (stages % own && own % stages) return null;
  const parts = stages / own, each = own / stages;
  const joined = values => Array.from({length: stages}, (_, k) =>
    stages > own ? values[Math.floor(k / parts)] / parts : total(values.slice(k * each, (k + 1) * each)));
  const hops = costs.hops.length ? Array.from({length: stages - 1}, (_, k) =>
    costs.hops[Math.max(0, Math.floor((k + 1) * own / stages) - 1)]) : [];
  return {...costs, hops, times: costs.times.map(joined), activation: joined(costs.activation),
    retained: joined(costs.retained), parameters: joined(costs.parameters), together: 1, pairs: {}};
}

function edgeTime(costs, sender, receiver) {
  if (sender === receiver) return 0;
  const own = costs.edges.filter(([from, to]) => from === sender && to === receiver).pop();
  return (own ? own[2] : costs.comm) + costs.message;
}

// Further time of what goes from a stage to its neighbour.
function hopTime(costs, made, taken) {
  return costs.hops.length && made !== taken ? costs.hops[Math.min(made, taken)][made > taken ? 1 : 0] : 0;
}

function passTime(costs, kind, stage, rank) {
  const time = kind === BW ? costs.times[B][stage] + costs.times[W][stage] : costs.times[kind][stage];
  return time / (costs.speeds.length ? costs.speeds[rank] : 1);
}

// What a pass waits for: [row of ends, stage].
function needsOf(schedule, kind, stage) {
  if (kind === F) return stage ? [[F, stage - 1]] : [];
  if (kind === W) return [[B, stage]];
  return stage + 1 < schedule.stages ? [[F, stage], [B, stage + 1]] : [[F, stage]];
}

// Start and end of each pass, in the order of each rank; a rank that cannot go on has fewer.
function simulate(schedule, costs) {
  const {m, orders} = schedule, ends = [F, B].map(() => new Float64Array(schedule.stages * m).fill(PENDING));
  const lag = orders.map((_, receiver) => orders.map((_, sender) => edgeTime(costs, sender, receiver)));
  const starts = orders.map(() => []), stops = orders.map(() => []), free = orders.map(() => 0);
  const needs = KINDS.map((_, kind) => Array.from({length: schedule.stages}, (_, stage) => needsOf(schedule, kind, stage)));

  function advance(rank) {
    const {kinds, stages, microbatches, together} = orders[rank], first = stops[rank].length;
    let last = first;
    while (together[last]) last++;
    let start = free[rank];
    for (let at = first; at <= last; at++) {
      for (const [row, stage] of needs[kinds[at]][stages[at]]) {
        if (last > first && filledWithin(orders[rank], first, last, row, stage, microbatches[at])) continue;
        const end = ends[row][stage * m + microbatches[at]];
        if (end === PENDING) return false;
        const sender = rankOf(schedule, stage, microbatches[at]);
        const hop = sender === rank ? 0 : hopTime(costs, stage, stages[at]);
        start = Math.max(start, end + (lag[rank][sender] + hop));
      }
    }
    const share = last > first ? shareOfPair(costs, kinds.slice(first, last + 1)) : 1;
    const times = [];
    for (let at = first; at <= last; at++) times.push(passTime(costs, kinds[at], stages[at], rank));
    const end = free[rank] = start + share * total(times);
    for (let at = first; at <= last; at++) {
      const kind = kinds[at];
      if (kind !== W) ends[kind === F ? F : B][stages[at] * m + microbatches[at]] = end;
      starts[rank].push(start);
      start += share * times[at - first];
      stops[rank].push(start);
    }
    return true;
  }

  let moved = true;
  while (moved) {
    moved = false;
    for (let rank = 0; rank < orders.length; rank++) {
      while (stops[rank].length < orders[rank].kinds.length && advance(rank)) moved = true;
    }
  }
  return {schedule, costs, starts, ends: stops};
}

function filledWithin({kinds, stages, microbatches}, first, last, row, stage, microbatch) {
  for (let at = first; at <= last; at++) {
    const filled = kinds[at] === W ? null : kinds[at] === F ? F : B;
    if (filled === row && stages[at] === stage && microbatches[at] === microbatch) return true;
  }
  return false;
}

// The time of passes of these kinds that run as one, over the sum of theirs: `Costs.share_of_pair`.
function shareOfPair(costs, kinds) {
  const own = costs.pairs[kinds.map(kind => KINDS[kind]).sort().join('')];
  return own === undefined ? costs.together : own;
}

// Makespan, idle GPU time and bubble, as a Timeline has them, and the time of each rank's passes.
function figuresOf({schedule, starts, ends}) {
  const ran = ends.map((own, rank) => rank).filter(rank => ends[rank].length);
  const makespan = Math.max(...ran.map(rank => ends[rank].at(-1))) - Math.min(...ran.map(rank => starts[rank][0]));
  const busy = ends.map((own, rank) => total(own.map((end, at) => end - starts[rank][at])));
  const most = Math.max(...busy), share = (work, span) => span ? (span - work) / span : 0;
  const window = Math.max(...ran.map(rank => ends[rank].at(-1) - starts[rank][0]));
  return {makespan, busy, most, bubble: share(most, window), idle: share(total(busy) / schedule.ranks, makespan)};
}

// Parts of the idle GPU time, as `analysis.gain.idle_parts`.
function idleParts(run, figures) {
  const silent = figuresOf(simulate(run.schedule, {...run.costs, comm: 0, message: 0, edges: [], hops: []})).makespan;
  const span = figures.makespan || 1, mean = total(figures.busy) / run.schedule.ranks;
  return {schedule: (silent - figures.most) / span, stages: (figures.most - mean) / span, messages: 1 - silent / span};
}

// Held after each pass and the most of each rank, as `analysis.memory.live` and `peak`; F takes
// its activation, B puts `retained` in its place, W releases that; BW does both one by one where
// others are split, and else frees what it has used.
function memoryOf({schedule, costs}) {
  const rounded = x => Math.round(x * 1e9) / 1e9 + 0;
  const change = (kind, stage) => {
    const activation = costs.activation[stage], retained = costs.retained[stage];
    return [activation, retained - activation, -retained, -activation][kind];
  };
  const live = schedule.orders.map(({kinds, stages}) => {
    let held = 0;
    return kinds.map((kind, at) => rounded(held += change(kind, stages[at])));
  });
  const split = schedule.orders.some(({kinds}) => kinds.includes(B) || kinds.includes(W));
  const most = live.map((own, rank) => own.map((held, at) => {
    const {kinds, stages} = schedule.orders[rank];
    return split && kinds[at] === BW ? rounded(held + costs.retained[stages[at]]) : held;
  }));
  return {live, most, peaks: most.map(own => own.reduce((a, b) => Math.max(a, b), 0))};
}
