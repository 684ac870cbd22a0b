// Zoom, pan, labels and explanations of the timelines of a page. `showTimelines` takes them.
const GUTTER = 64, MARGIN = 66, AXIS = 26;
const tooltip = document.getElementById('tooltip');
const layout = document.querySelector('.panels');
let data = {unit: '', meanings: {}}, panels = [], horizon = 1, view = [0, 1];

// Take the timelines whose frames are in the page: what `render.html` knows of each panel.
function showTimelines(shown) {
  data = shown;
  horizon = data.horizon || 1;
  view = [0, horizon];
  panels = data.panels.map((panel, index) => {
    const svg = document.getElementById('panel-' + index);
    const part = name => svg.querySelector('.' + name);
    return {...panel, svg, stretch: part('stretch'), labels: part('labels'), axis: part('axis'), marks: part('marks')};
  });
  panels.forEach(listen);
}

const show = x => String(Number(x.toPrecision(5)));
const escape = text => text.replace(/[&<>"]/g, c => ({'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'}[c]));
const passName = (row, i) => row.stages[i] + row.kinds[i] + row.microbatches[i] + (row.slices[i] ? '.' + row.slices[i] : '');
const phaseName = (row, i) => (row.phases.filter(([first]) => first <= i).pop() || [0, ''])[1];
const scale = panel => panel.width / (view[1] - view[0]);
const toX = (panel, time) => GUTTER + (time - view[0]) * scale(panel);

// Index of the first pass of a row that ends after `time`.
function firstAfter(row, time) {
  let low = 0, high = row.ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.ends[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

function niceStep(span, count) {
  const rough = span / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(factor => factor * power >= rough);
}

function drawAxis(panel) {
  const bottom = panel.rows.length * panel.row, step = niceStep(view[1] - view[0], panel.width / 90);
  let out = '';
  for (let k = Math.ceil(view[0] / step); k * step <= view[1]; k++) {
    const x = toX(panel, k * step).toFixed(1);
    out += `<line x1="${x}" x2="${x}" y1="${bottom}" y2="${bottom + 5}"/><text x="${x}" y="${bottom + 19}" text-anchor="middle">${show(k * step)}</text>`;
  }
  panel.axis.innerHTML = out + `<text x="${GUTTER + panel.width + 10}" y="${bottom + 19}">${escape(data.unit)}</text>`;
}

function drawLabels(panel) {
  let out = '', drawn = 0, covered = 0;
  panel.rows.forEach((row, rank) => {
    const y = (rank + panel.bar / 2 + 0.06) * panel.row + 4;
    for (let i = firstAfter(row, view[0]); i < row.starts.length && row.starts[i] < view[1]; i++) {
      const left = Math.max(row.starts[i], view[0]), right = Math.min(row.ends[i], view[1]);
      const width = (right - left) * scale(panel);
      covered += width; drawn++;
      const full = passName(row, i), short = String(row.microbatches[i]);
      const text = width > 7 * full.length + 8 ? full : width > 7 * short.length + 3 ? short : '';
      if (text) {
        out += `<text x="${toX(panel, (left + right) / 2).toFixed(1)}" y="${y}" style="fill:${panel.inks[row.kinds[i]][panel.route ? panel.route[row.microbatches[i] % panel.route.length] : panel.chunks[row.stages[i]]]}">${text}</text>`;
      }
    }
  });
  panel.labels.innerHTML = panel.row * panel.bar >= 12 ? out : '';
  panel.svg.classList.toggle('dense', covered < 5 * drawn);
}

function draw() {
  for (const panel of panels) {
    panel.width = Math.max(40, panel.svg.clientWidth - GUTTER - MARGIN);
    panel.stretch.setAttribute('width', panel.width);
    panel.stretch.setAttribute('viewBox', `${view[0]} 0 ${view[1] - view[0]} ${panel.rows.length}`);
    panel.svg.querySelectorAll('.peak').forEach(text => text.setAttribute('x', GUTTER + panel.width + 8));
    panel.marks.innerHTML = '';
    drawAxis(panel);
    drawLabels(panel);
  }
}

function setView(start, end) {
  const span = Math.min(horizon, Math.max(end - start, horizon * 1e-5));
  const left = Math.min(Math.max(start, 0), horizon - span);
  view = [left, left + span];
  draw();
}

function zoom(factor, time = (view[0] + view[1]) / 2) {
  setView(time - (time - view[0]) * factor, time + (view[1] - time) * factor);
}

function box(panel, rank, i, style = '') {
  const row = panel.rows[rank], left = Math.max(toX(panel, row.starts[i]), GUTTER);
  const right = Math.min(toX(panel, row.ends[i]), GUTTER + panel.width);
  if (right < left) return '';
  return `<rect class="${style}" x="${left}" y="${(rank + 0.06) * panel.row}" width="${right - left}" height="${panel.bar * panel.row}" rx="2"/>`;
}

// The pass under the pointer: [rank, index], or null.
function hit(panel, event) {
  const area = panel.svg.getBoundingClientRect();
  const time = view[0] + (event.clientX - area.left - GUTTER) / scale(panel);
  const rank = Math.floor((event.clientY - area.top) / panel.row), row = panel.rows[rank];
  if (!row || time < view[0] || time > view[1]) return null;
  const i = firstAfter(row, time);
  return i < row.starts.length && row.starts[i] <= time ? [rank, i] : null;
}

function mark(panel, rank, i) {
  for (const other of panels) {
    other.marks.innerHTML = other.same === panel.same ? box(other, rank, i) : '';
  }
  const [causeRank, cause] = panel.rows[rank].waits[i];
  if (causeRank < 0) return;
  const from = panel.rows[causeRank].ends[cause], y = r => (r + panel.bar / 2 + 0.06) * panel.row;
  const inside = time => Math.min(Math.max(toX(panel, time), GUTTER), GUTTER + panel.width);
  panel.marks.innerHTML += box(panel, causeRank, cause, 'cause') +
    `<line class="cause" x1="${inside(from)}" y1="${y(causeRank)}" x2="${inside(panel.rows[rank].starts[i])}" y2="${y(rank)}"/>`;
}

function describe(panel, rank, i) {
  const row = panel.rows[rank], stage = row.stages[i], [causeRank, cause] = row.waits[i];
  const gap = row.starts[i] - (i ? row.ends[i - 1] : 0);
  const lines = panels.filter(other => other.same === panel.same).map(other => {
    const {starts, ends} = other.rows[rank];
    return `<tr><td>${escape(other.name)}</td><td>${show(starts[i])}</td><td>${show(ends[i])}</td><td>${show(ends[i] - starts[i])}</td></tr>`;
  });
  const waited = causeRank >= 0 ? `waited ${show(gap)} for <b>${passName(panel.rows[causeRank], cause)}</b> of rank ${panel.rows[causeRank].rank}`
    : gap > 1e-8 * horizon ? `its rank idled for ${show(gap)} before`
    : 'started as soon as its rank was free';
  const phase = phaseName(row, i) && `<br>phase: ${escape(phaseName(row, i))}`;
  const hosted = row.host ? `, ${show(row.host[i])} on the host` : '';
  const held = row.live ? `<br>rank ${row.rank} then holds ${show(row.live[i])} activations${hosted}` : '';
  return `<b>${passName(row, i)}</b> ${data.meanings[row.kinds[i]]}<br>microbatch ${row.microbatches[i]}, stage ${stage} ` +
    `(chunk ${panel.chunks[stage]} of rank ${row.rank})${phase}<table><tr class="soft"><th></th><th>start</th><th>end</th><th>time</th></tr>${lines.join('')}</table>${waited}${held}`;
}

function hover(panel, event) {
  const found = hit(panel, event);
  if (!found) return leave();
  mark(panel, ...found);
  tooltip.innerHTML = describe(panel, ...found);
  tooltip.hidden = false;
  const {width, height} = tooltip.getBoundingClientRect();
  const left = event.clientX + 18 + width > innerWidth ? event.clientX - width - 18 : event.clientX + 18;
  const top = event.clientY + 18 + height > innerHeight ? event.clientY - height - 18 : event.clientY + 18;
  tooltip.style.left = Math.max(4, left) + 'px';
  tooltip.style.top = Math.max(4, top) + 'px';
}

function leave() {
  tooltip.hidden = true;
  for (const panel of panels) panel.marks.innerHTML = '';
}

function listen(panel) {
  let grabbed = null;
  panel.stretch.addEventListener('wheel', event => {
    event.preventDefault();
    const x = event.clientX - panel.svg.getBoundingClientRect().left - GUTTER;
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), view[0] + x / scale(panel));
  }, {passive: false});
  panel.stretch.addEventListener('pointerdown', event => {
    grabbed = {x: event.clientX, view};
    panel.stretch.setPointerCapture(event.pointerId);
    panel.stretch.classList.add('dragged');
    leave();
  });
  panel.stretch.addEventListener('pointermove', event => {
    if (!grabbed) return hover(panel, event);
    const moved = (event.clientX - grabbed.x) / panel.width * (grabbed.view[1] - grabbed.view[0]);
    setView(grabbed.view[0] - moved, grabbed.view[1] - moved);
  });
  for (const end of ['pointerup', 'pointercancel']) {
    panel.stretch.addEventListener(end, () => { grabbed = null; panel.stretch.classList.remove('dragged'); });
  }
  panel.stretch.addEventListener('pointerleave', leave);
  panel.stretch.addEventListener('dblclick', () => setView(0, horizon));
}

const setLayout = columns => {
  layout.classList.toggle('columns', columns);
  document.getElementById('layout').setAttribute('aria-pressed', columns);
  document.getElementById('layout').textContent = columns ? 'stacked' : 'side by side';
  draw();
};
const keys = {
  '+': () => zoom(0.7), '=': () => zoom(0.7), '-': () => zoom(1 / 0.7), '0': () => setView(0, horizon),
  ArrowLeft: () => setView(...view.map(t => t - 0.1 * (view[1] - view[0]))),
  ArrowRight: () => setView(...view.map(t => t + 0.1 * (view[1] - view[0]))),
};
document.addEventListener('keydown', event => {
  const typed = event.target.closest && event.target.closest('input, select, summary');  // which has keys of its own
  if (keys[event.key] && !typed && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); }
});
document.getElementById('in').onclick = keys['+'];
document.getElementById('out').onclick = keys['-'];
document.getElementById('reset').onclick = keys['0'];
document.getElementById('layout').onclick = () => setLayout(!layout.classList.contains('columns'));
addEventListener('resize', draw);
