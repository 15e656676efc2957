// SPDX-License-Identifier: Apache-2.0
//
// The rest of the report's page, after page_curves.js: tables, pictures of one run, and the page itself.

// ---- the table of runs ----

const last = (line) => line && line.y.length ? line.y[line.y.length - 1] : null;
const least = (line) => line ? line.y.reduce((a, b) => b !== null && (a === null || b < a) ? b : a, null) : null;
function median(list) {
  const sorted = list.filter((x) => x !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
function stateOf(run) {
  if (run.end === 'done') return 'done';
  if (run.end === 'stopped') return 'stopped';
  return run.end ? h('span', {class: 'bad'}, run.end) : 'running, or killed';
}
function runsTable() {
  const bits = state.data.runs.some((r) => r.tests.bits_per_byte);
  const rows = state.data.runs.map((run) => {
    const box = h('input', {type: 'checkbox', 'aria-label': `show ${run.name}`, on: {change: () => {
      if (box.checked) state.hidden.delete(run.folder); else state.hidden.add(run.folder);
      drawCurves();
    }}});
    box.checked = !state.hidden.has(run.folder);
    const name = h('td', {}, h('label', {title: run.folder}, box, swatch(run), run.name));
    return [name, stateOf(run), run.steps ? `${short(run.step)} of ${short(run.steps)}` : short(run.step),
      short(last(run.lines.loss)), short(least(run.tests.loss)),
      ...(bits ? [short(least(run.tests.bits_per_byte))] : []),
      short(run.lines.tokens_per_second ? median(run.lines.tokens_per_second.y) : null),
      run.seconds >= 0 ? time(run.seconds) : '-', run.skipped ? h('span', {class: 'bad'}, String(run.skipped)) : '0'];
  });
  return table(['run', 'state', 'step', 'last loss', 'best held out', ...(bits ? ['best bits per byte'] : []),
    'tokens/s, median', 'time', 'skipped'], rows, (i) => i > 1);
}

// ---- choosing one run ----

function perRun(title, has, make) {
  const runs = state.data.runs.filter(has);
  if (!runs.length) return null;
  const body = h('div', {});
  const fill = (run) => body.replaceChildren(make(run));
  const select = h('select', {'aria-label': `${title}: run`, on: {change: () => fill(runs[select.selectedIndex])}},
    ...runs.map((r) => h('option', {}, r.name)));
  const node = h('section', {'aria-label': title, id: title.toLowerCase().replace(/[^a-z]+/g, '-')},
    h('div', {class: 'head'}, h('h2', {}, title), runs.length > 1 ? h('label', {class: 'controls muted'}, 'run', select)
      : null), body);
  node.draw = () => fill(runs[Math.max(0, select.selectedIndex)]);
  return node;
}

// ---- experts ----

const parse = (color) => /^#/.test(color) ? [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16)) : [0, 0, 0];
function mix(a, b, share) {
  return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * share)).join(',')})`;
}
function heatMap(run) {
  const {steps, layers} = run.loads, columns = steps.length, most = Math.max(150, ...layers.flat());
  const canvas = h('canvas', {width: columns, height: layers.length, 'aria-hidden': 'true'});
  const plot = h('div', {class: 'plot'}, canvas);
  canvas.style.height = `${Math.max(90, Math.min(420, layers.length * 22))}px`;
  const paint = canvas.getContext('2d'), from = parse(css('--card')), to = parse(css('--heat'));
  layers.forEach((row, l) => row.forEach((x, c) => {
    const share = 0.08 + 0.92 * Math.min(1, Math.max(0, x - 100) / (most - 100));
    paint.fillStyle = x < 0 ? css('--page') : mix(from, to, share);
    paint.fillRect(c, l, 1, 1);
  }));
  let cell = [0, 0];
  const point = (c, l) => {
    cell = [c, l];
    const x = layers[l][c];
    return {x: (c + 0.5) / columns * plot.clientWidth, y: (l + 0.5) / layers.length * canvas.clientHeight,
      text: `from step ${steps[c]}, expert layer ${l}\n` +
        `fullest expert: ${x < 0 ? '-' : (x / 100).toFixed(2)} of the mean`};
  };
  interactive(plot, 'Load of experts, a heat map. Arrow keys read cells.', {
    at: (x, y) => point(Math.min(columns - 1, Math.max(0, Math.floor(x / plot.clientWidth * columns))),
      Math.min(layers.length - 1, Math.max(0, Math.floor(y / canvas.clientHeight * layers.length)))),
    key: (e) => {
      const move = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[e.key];
      return move && point(Math.min(columns - 1, Math.max(0, cell[0] + move[0])),
        Math.min(layers.length - 1, Math.max(0, cell[1] + move[1])));
    },
  });
  const every = Math.max(1, Math.ceil(columns / 30)), shown = steps.map((_, c) => c).filter((c) => c % every === 0);
  return h('div', {}, h('p', {class: 'muted'}, 'Rows are layers, columns are steps; the colour is the load of the ' +
    `fullest expert: pale is 1 (all equal), strong is ${(most / 100).toFixed(2)} times the mean.`), plot,
    h('div', {class: 'head muted'}, h('span', {}, `step ${steps[0]}`), h('span', {}, `step ${run.step}`)),
    folded('Table', () => table(['step', ...layers.map((_, l) => `layer ${l}`)],
      shown.map((c) => [String(steps[c]), ...layers.map((row) => row[c] < 0 ? '' : (row[c] / 100).toFixed(2))]),
      () => true)));
}

// ---- watched values ----

const STATISTICS = {rms: 'root mean square', largest: 'largest magnitude', smallest: 'smallest magnitude', mean: 'mean',
  zeros: 'share of zeros', nans: 'NaN elements', infs: 'infinite elements'};
// From 0, pale, to 1; magnitudes on a log scale.
function shares(rows, statistic) {
  const log = !/zeros|nans|infs/.test(statistic), of = (x) => log ? Math.log(Math.abs(x)) : Math.log1p(x);
  const all = rows.flat().filter((x) => x !== null && (!log || x !== 0)).map(of);
  const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity);
  return (x) => x === null || (log && x === 0) ? 0 : high > low ? (of(x) - low) / (high - low) : log ? 0.5 : x > 0 ? 1 : 0;
}
function watchedMap(run) {
  const w = run.watched, columns = w.steps.length, canvas = h('canvas', {'aria-hidden': 'true'});
  const plot = h('div', {class: 'plot'}, canvas), count = h('span', {class: 'muted'});
  let rows = [], cell = [0, 0];
  const draw = () => {
    const text = state.watchedFilter.toLowerCase(), values = w[state.statistic];
    rows = w.names.map((name, i) => ({name, i, x: values[i]})).filter((r) => r.name.toLowerCase().includes(text));
    count.textContent = `${rows.length} of ${w.names_in_all} values`;
    canvas.width = columns;
    canvas.height = Math.max(1, rows.length);
    canvas.style.height = `${Math.max(60, Math.min(520, rows.length * 16))}px`;
    const paint = canvas.getContext('2d'), from = parse(css('--card')), to = parse(css('--heat'));
    const share = shares(rows.map((r) => r.x), state.statistic);
    rows.forEach((r, l) => r.x.forEach((x, c) => {
      paint.fillStyle = x === null ? css('--page') : mix(from, to, 0.06 + 0.94 * share(x));
      paint.fillRect(c, l, 1, 1);
    }));
  };
  const point = (c, l) => {
    if (!rows.length) return null;
    cell = [c, l];
    const r = rows[l];
    return {x: (c + 0.5) / columns * plot.clientWidth, y: (l + 0.5) / rows.length * canvas.clientHeight,
      text: `${r.name}\nstep ${w.steps[c]}, ${STATISTICS[state.statistic]}: ${short(r.x[c])}`};
  };
  const within = (x, n) => Math.min(n - 1, Math.max(0, x));
  interactive(plot, 'Watched values, a heat map. Arrow keys read cells.', {
    at: (x, y) => point(within(Math.floor(x / plot.clientWidth * columns), columns),
      within(Math.floor(y / canvas.clientHeight * rows.length), rows.length)),
    key: (e) => {
      const move = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[e.key];
      return move && point(within(cell[0] + move[0], columns), within(cell[1] + move[1], rows.length));
    },
  });
  const statistic = h('select', {'aria-label': 'statistic', on: {change: () => {
    state.statistic = statistic.value;
    draw();
  }}}, ...Object.entries(STATISTICS).map(([value, label]) => h('option', {value}, label)));
  statistic.value = state.statistic;
  const filter = h('input', {type: 'search', placeholder: 'filter', 'aria-label': 'filter values', on: {input: () => {
    state.watchedFilter = filter.value;
    draw();
  }}});
  filter.value = state.watchedFilter;
  draw();
  return h('div', {}, h('p', {class: 'muted'}, 'Rows are values, columns are steps; stronger colours are larger, ' +
    'magnitudes on a log scale. Point at a cell to read its name and value.'),
    h('div', {class: 'controls'}, statistic, filter, count), plot,
    h('div', {class: 'head muted'}, h('span', {}, `step ${w.steps[0]}`), h('span', {}, `step ${w.steps[columns - 1]}`)),
    folded('Table', () => table([`step ${w.steps[columns - 1]}`, ...Object.values(STATISTICS)], rows.slice(0, 200)
      .map((r) => [r.name, ...Object.keys(STATISTICS).map((k) => short(w[k][r.i][columns - 1]))]), (i) => i > 0)));
}

// ---- the arena ----

function arena(run) {
  const plan = run.plan, canvas = h('canvas', {'aria-hidden': 'true'}), plot = h('div', {class: 'plot'}, canvas);
  const height = 360, step = plan.buffers.filter((b) => b[3] >= plan.persistent_bytes);
  const span = Math.max(1, plan.planned_bytes - plan.persistent_bytes), ops = Math.max(1, plan.ops);
  const kinds = [...new Set(plan.buffers.map((b) => b[1]))], bands = new Map();
  for (const b of plan.buffers) if (b[3] < plan.persistent_bytes) bands.set(b[1], (bands.get(b[1]) || 0) + b[2]);
  canvas.style.height = `${height}px`;
  const box = (b) => {
    const w = plot.clientWidth;
    return [b[4] / ops * w, height - (b[3] + b[2] - plan.persistent_bytes) / span * height,
      Math.max(1, (b[5] + 1 - b[4]) / ops * w), Math.max(1, b[2] / span * height)];
  };
  const draw = (chosen) => {
    const scale = window.devicePixelRatio || 1, w = plot.clientWidth || 800;
    canvas.width = w * scale;
    canvas.height = height * scale;
    const paint = canvas.getContext('2d');
    paint.scale(scale, scale);
    paint.fillStyle = css('--page');
    paint.fillRect(0, 0, w, height);
    paint.lineWidth = 0.5;
    paint.strokeStyle = css('--card');
    for (const b of step) {
      const r = box(b);
      paint.fillStyle = KINDS[b[1]] || '#c2c7cd';
      paint.fillRect(...r);
      if (r[2] > 3 && r[3] > 3) paint.strokeRect(...r);
    }
    if (!chosen) return;
    paint.lineWidth = 2;
    paint.strokeStyle = css('--text');
    paint.strokeRect(...box(chosen));
  };
  const phase = (op) => (plan.phases.filter((p) => p[0] <= op).pop() || ['', ''])[1];
  const point = (b) => {
    draw(b);
    if (!b) return null;
    const r = box(b);
    return {x: Math.min(plot.clientWidth, r[0] + r[2] / 2), y: r[1],
      text: `${b[0]}\n${b[1]}, ${bytes(b[2])} at ${bytes(b[3])}\nops ${b[4]} to ${b[5]}, ${phase(b[4])}`};
  };
  let chosen = -1;
  interactive(plot, 'The arena, a picture. Arrow keys go through the buffers, largest first.', {
    at: (x, y) => point(step.findLast((b) => {
      const r = box(b);
      return x >= r[0] && x < r[0] + r[2] && y >= r[1] && y < r[1] + r[3];
    })),
    key: (e) => {
      const move = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1}[e.key];
      if (!move) return undefined;
      chosen = Math.max(0, Math.min(step.length - 1, chosen + move));
      return point(step[chosen]);
    },
  });
  onResize(plot, () => draw());
  const more = plan.buffers_in_all - plan.buffers.length;
  return h('div', {}, h('p', {class: 'muted'}, `${bytes(plan.planned_bytes)} in all, ` +
    `${bytes(plan.persistent_bytes)} persistent (` +
    [...bands].map(([kind, n]) => `${kind} ${bytes(n)}`).join(', ') +
    `). Below, the step: ${plan.ops} ops to the right, addresses upward, ${bytes(span)}.` +
    (more > 0 ? ` ${more} smaller buffers are not drawn.` : '')), plot,
    h('p', {}, ...kinds.map((kind) => {
      const box = h('i', {});
      box.style.background = KINDS[kind] || '#c2c7cd';
      return h('span', {class: 'key'}, box, kind);
    })),
    folded('Table', () => table(['buffer', 'kind', 'bytes', 'first op', 'last op'],
      [...plan.buffers].sort((a, b) => b[2] - a[2]).slice(0, 100)
        .map((b) => [b[0], b[1], bytes(b[2]), String(b[4]), String(b[5])]), (i) => i > 1)));
}

// ---- the roofline ----

function roofline(run) {
  const p = run.profile, plot = h('div', {class: 'plot'}), height = 320;
  const ops = p.ops.filter((o) => o[2] > 0 && o[3] > 0 && o[4] > 0).map((o) => ({name: o[0], kernel: o[1], ms: o[2],
    x: o[3] / o[4], y: o[3] / (o[2] / 1e3), share: o[5]}));
  const kernels = [...new Set(ops.map((o) => o.kernel))];
  const ridge = p.flops_per_second / p.bytes_per_second;
  const lowX = Math.min(ridge / 10, ...ops.map((o) => o.x)) / 1.5;
  const highX = Math.max(ridge * 10, ...ops.map((o) => o.x)) * 1.5;
  const highY = Math.max(p.flops_per_second, ...ops.map((o) => o.y)) * 2;
  const lowY = Math.min(lowX * p.bytes_per_second, ...ops.map((o) => o.y)) / 2;
  const px = (x) => 62 + Math.log(x / lowX) / Math.log(highX / lowX) * (plot.clientWidth - 74);
  const py = (y) => height - 28 - Math.log(y / lowY) / Math.log(highY / lowY) * (height - 40);
  const roof = (x) => Math.min(p.flops_per_second, x * p.bytes_per_second);
  let ring;
  const draw = () => {
    const width = plot.clientWidth || 800;
    const svg = s('svg', {viewBox: `0 0 ${width} ${height}`, height, 'aria-hidden': 'true'});
    for (const y of logTicks(lowY, highY, 6))
      svg.append(s('line', {class: 'grid-line', x1: 62, x2: width - 12, y1: py(y), y2: py(y)}),
        s('text', {x: 56, y: py(y) + 4, 'text-anchor': 'end'}, short(y)));
    for (const x of logTicks(lowX, highX, Math.floor(width / 90)))
      svg.append(s('text', {x: px(x), y: height - 10, 'text-anchor': 'middle'}, short(x)));
    svg.append(s('path', {class: 's7', d: `M${px(lowX)} ${py(roof(lowX))}L${px(ridge)} ${py(p.flops_per_second)}` +
      `L${px(highX)} ${py(p.flops_per_second)}`}));
    const longest = Math.max(...ops.map((o) => o.ms));
    for (const o of ops)
      svg.append(s('circle', {class: `f${kernels.indexOf(o.kernel) % 7}`, cx: px(o.x), cy: py(o.y),
        r: 3 + 9 * Math.sqrt(o.ms / longest), 'fill-opacity': 0.6}));
    ring = s('circle', {class: 'cursor', r: 14, cx: -99, cy: 0, fill: 'none'});
    svg.append(ring);
    const old = plot.querySelector('svg');
    if (old) old.replaceWith(svg); else plot.prepend(svg);
  };
  const point = (o) => o ? {x: px(o.x), y: py(o.y), text: `${o.name}\n${o.kernel}, ${o.ms.toFixed(3)} ms\n` +
    `${short(o.x)} FLOP/byte, ${short(o.y)}FLOP/s, ${(100 * o.share).toFixed(0)} % of the roofline`} : null;
  let chosen = -1;
  interactive(plot, 'Roofline, a chart of ops. Arrow keys go through the ops, longest first.', {
    mark: (at) => { if (ring) { ring.setAttribute('cx', at ? at.x : -99); ring.setAttribute('cy', at ? at.y : 0); } },
    at: (x, y) => {
      let best = null, distance = 400;
      for (const o of ops) {
        const d = (px(o.x) - x) ** 2 + (py(o.y) - y) ** 2;
        if (d < distance) [best, distance] = [o, d];
      }
      return point(best);
    },
    key: (e) => {
      const move = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1}[e.key];
      if (!move || !ops.length) return undefined;
      chosen = Math.max(0, Math.min(ops.length - 1, chosen + move));
      return point(ops[chosen]);
    },
  });
  onResize(plot, draw);
  return h('div', {}, h('p', {class: 'muted'}, `${p.device}, ${p.dtype}: ` +
    `${p.ms_per_step.toFixed(2)} ms per step. To the right, FLOPs per byte; upward, FLOPs per second; the line is the ` +
    'ceiling; the area of a circle is the time of an op.'), plot,
    h('p', {}, ...kernels.map((k, i) => h('span', {class: 'key'}, s('svg', {class: 'swatch', viewBox: '0 0 30 10'},
      s('circle', {class: `f${i % 7}`, cx: 15, cy: 5, r: 5})), k || 'several'))),
    folded('Table', () => table(['op', 'kernel', 'ms', 'FLOP/s', 'bytes/s', 'of the roofline'],
      p.ops.slice(0, 100).map((o) => [o[0], o[1], o[2].toFixed(3), short(o[3] / o[2] * 1e3), short(o[4] / o[2] * 1e3),
        `${(100 * o[5]).toFixed(0)} %`]), (i) => i > 1)));
}

// ---- text ----

function samples(run) {
  return table(['step', 'prompt', 'text'], run.samples.map(([step, prompt, text]) =>
    [String(step), h('pre', {}, prompt), h('pre', {}, text)]), (i) => i === 0);
}

function configuration() {
  const runs = state.data.runs, keys = new Map();
  runs.forEach((run, i) => run.config.forEach(([key, value, source]) => {
    if (!keys.has(key)) keys.set(key, runs.map(() => null));
    keys.get(key)[i] = [value, source];
  }));
  const body = h('div', {}), several = runs.length > 1;
  const fill = () => {
    const rows = [];
    for (const [key, values] of keys) {
      const differs = several && values.some((v) => (v && v[0]) !== (values[0] && values[0][0]));
      if (several && state.different && !differs) continue;
      if (state.search && !(key + values.map((v) => v && v[0])).toLowerCase().includes(state.search)) continue;
      rows.push([key, ...values.map((v) => h('td', {class: differs ? 'differs' : undefined}, v ? v[0] : 'not set',
        v && v[1] ? h('small', {}, ` ${v[1]}`) : null))]);
    }
    body.replaceChildren(rows.length ? table(['key', ...runs.map((r) => r.name)], rows)
      : h('p', {}, several && state.different ? 'The configurations are equal.' : 'No key contains this text.'));
  };
  const different = h('input', {type: 'checkbox', id: 'different', on: {change: () => {
    state.different = different.checked;
    fill();
  }}});
  different.checked = state.different;
  const search = h('input', {type: 'search', placeholder: 'filter', 'aria-label': 'filter keys', on: {input: () => {
    state.search = search.value.toLowerCase();
    fill();
  }}});
  search.value = state.search;
  const node = h('section', {'aria-label': 'Configuration', id: 'configuration'}, h('div', {class: 'head'},
    h('h2', {}, 'Configuration'), h('div', {class: 'controls'}, several ? h('label', {class: 'muted'}, different,
      'only differences ') : null, search)), body);
  fill();
  return node;
}

function facts() {
  const runs = state.data.runs, names = [...new Set(runs.flatMap((r) => r.facts.map((f) => f[0])))];
  if (!names.length) return null;
  const value = (run, name) => {
    const fact = run.facts.find((f) => f[0] === name);
    if (!fact || fact[1] === null) return '';
    if (/_bytes$/.test(name)) return bytes(fact[1]);
    return typeof fact[1] === 'number' ? short(fact[1]) : String(fact[1]);
  };
  return card('Machine and model', table(['', ...runs.map((r) => r.name)],
    names.map((name) => [name.replace(/_/g, ' '), ...runs.map((r) => value(r, name))])));
}

function events() {
  const rows = state.data.runs.flatMap((run) => run.events.map((e) => ({run, e})));
  const shown = rows.slice(-200).map(({run, e}) => [run.name, String(e[0]), state.data.runs.some((r) => r.seconds >= 0)
    ? time(e[1] || 0) : '', e[2] === 'warning' ? h('span', {class: 'bad'}, 'warning') : e[2], e[3]]);
  return card('Events', folded(`${rows.length} events`,
    () => table(['run', 'step', 'time', 'event', ''], shown, (i) => i === 1 || i === 2)));
}

// ---- the page ----

function setTheme(theme) {
  if (theme === 'auto') document.documentElement.removeAttribute('data-theme');
  else document.documentElement.setAttribute('data-theme', theme);
  for (const node of document.querySelectorAll('section')) if (node.draw) node.draw();
}

function controls() {
  const timed = state.data.runs.every((r) => r.seconds >= 0), words = state.data.runs.every((r) => r.tokens > 0);
  const option = (value, label) => h('option', {value}, label);
  const x = h('select', {id: 'x', on: {change: () => { state.x = x.value; setRange(null); }}}, option('step', 'steps'),
    timed ? option('time', 'time') : null, words ? option('tokens', 'tokens') : null);
  const smooth = h('input', {type: 'range', id: 'smooth', min: 0, max: 0.99, step: 0.01, value: state.smooth,
    on: {input: () => { state.smooth = +smooth.value; drawCurves(); }}});
  const theme = h('select', {id: 'theme', on: {change: () => setTheme(theme.value)}}, option('auto', 'system'),
    option('light', 'light'), option('dark', 'dark'));
  const reset = h('button', {id: 'reset', type: 'button', disabled: true, on: {click: () => setRange(null)}},
    'Show all');
  return h('div', {class: 'controls'}, h('label', {}, 'x axis', x), h('label', {}, 'smoothing', smooth), reset,
    h('label', {}, 'colours', theme));
}

function build() {
  charts = CURVES.filter(hasCurve).map((c) => new Chart(c));
  const parts = [
    h('header', {},
      h('h1', {}, state.data.runs.length === 1 ? state.data.runs[0].name : `${state.data.runs.length} runs`),
      h('div', {class: 'muted'}, `Refrain ${state.data.version}`, h('span', {id: 'status', role: 'status'})),
      controls()),
    h('main', {}, h('section', {'aria-label': 'Runs', id: 'runs'}, runsTable()),
      h('p', {class: 'muted controls'}, 'Drag in a chart to zoom, double-click to show all.'),
      h('div', {class: 'grid curves', id: 'curves'}, ...charts.map((c) => c.node)),
      perRun('Experts by layer', (r) => r.loads, heatMap),
      perRun('Watched values', (r) => r.watched, watchedMap), perRun('Arena of the step', (r) => r.plan, arena),
      perRun('Roofline by op', (r) => r.profile, roofline),
      perRun('Samples', (r) => r.samples && r.samples.length, samples),
      configuration(), facts(), events()),
  ];
  document.body.replaceChildren(...parts.filter((p) => p));
  for (const node of document.querySelectorAll('section')) if (node.draw) node.draw();
  drawCurves();
}

// New data changes curves, the table of runs and the events; everything that the reader has set stays.
function refresh(data) {
  const kinds = (d) => CURVES.filter((c) => d.runs.some((r) => c.series.some((n) => r.lines[n]))).length;
  const same = kinds(data) === kinds(state.data);
  state.data = data;
  if (!same) { build(); return; }
  document.getElementById('runs').replaceChildren(runsTable());
  drawCurves();
}
async function poll() {
  try {
    const answer = await fetch(`/data.json?${state.data.bytes}`, {cache: 'no-store'});
    if (answer.status === 200) refresh(prepare(await answer.json()));
    if (!answer.ok) throw new Error(answer.statusText);
    document.getElementById('status').textContent = ', live';
  } catch (e) {
    document.getElementById('status').textContent = ', connection lost';
  }
  setTimeout(poll, 2000);
}

prepare(state.data);
document.title = `Refrain: ${state.data.runs.map((r) => r.name).join(', ')}`.slice(0, 200);
build();
let width = window.innerWidth;
window.addEventListener('resize', () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  drawCurves();
});
if (state.data.follow) setTimeout(poll, 2000);
