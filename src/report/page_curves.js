// SPDX-License-Identifier: Apache-2.0
//
// The report's page: elements, numbers and the charts of curves; page.js has the rest. All text of the runs reaches
// the document as text nodes or attribute values, never as markup.
// Curves share one range of the x axis: a zoom in one of them is a zoom in all.
'use strict';
const state = {
  data: JSON.parse(document.getElementById('data').textContent),
  x: 'step', range: null, smooth: 0, hidden: new Set(), log: new Set(['grad_norm']), different: true, search: '',
  statistic: 'rms', watchedFilter: '',
};
const CURVES = [
  {title: 'Loss', series: ['loss'], unit: 'nats', evaluated: true},
  {title: 'Bits per byte', series: ['bits_per_byte'], unit: '', evaluated: true},
  {title: 'Learning rate', series: ['lr'], unit: ''},
  {title: 'Gradient norm', series: ['grad_norm'], unit: ''},
  {title: 'Speed', series: ['tokens_per_second'], unit: 'tokens/s'},
  {title: 'Memory in use', series: ['resident_bytes', 'device_bytes'], names: ['host', 'device'], unit: 'bytes'},
  {title: 'Load of experts', series: ['most_load', 'least_load'], names: ['fullest', 'emptiest'], unit: 'of the mean'},
  {title: 'Reward margin', series: ['margin'], unit: '', evaluated: true},
  {title: 'Accuracy of preferences', series: ['accuracy'], unit: '', evaluated: true},
];
const KINDS = {
  activation: '#8ab6e8', gradient: '#f2a65a', workspace: '#c2c7cd', output: '#7fc8a9', load: '#9ed3d6',
  weight: '#b9a2d8', state: '#e2a3bd', input: '#d9cf87',
};

// ---- elements ----

function add(e, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === 'on') for (const [name, f] of Object.entries(value)) e.addEventListener(name, f);
    else if (value === true) e.setAttribute(key, '');
    else if (value !== false && value !== undefined) e.setAttribute(key, value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}
const h = (tag, attributes, ...children) => add(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  add(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function table(heads, rows, numeric) {
  const cell = (tag, c, i) => {
    const attributes = {class: numeric && numeric(i) ? 'n' : undefined, scope: tag === 'th' ? 'col' : undefined};
    return c instanceof Node && c.nodeName === 'TD' ? c : h(tag, attributes, c);
  };
  return h('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'table'}, h('table', {},
    h('thead', {}, h('tr', {}, ...heads.map((c, i) => cell('th', c, i)))),
    h('tbody', {}, ...rows.map((r) => h('tr', {}, ...r.map((c, i) => cell('td', c, i)))))));
}

// A table that is made when it is opened.
function folded(title, make) {
  const d = h('details', {}, h('summary', {}, title));
  d.addEventListener('toggle', () => {
    while (d.children.length > 1) d.lastChild.remove();
    if (d.open) d.append(make());
  });
  return d;
}
const card = (title, ...children) => h('section', {'aria-label': title}, h('div', {class: 'head'}, h('h2', {}, title)),
  ...children);

// ---- numbers ----

function bytes(x) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let u = 0;
  for (; Math.abs(x) >= 1024 && u < 4; u++) x /= 1024;
  return `${+x.toFixed(!u ? 0 : Math.abs(x) < 10 ? 2 : 1)} ${units[u]}`;
}
function short(x) {
  if (x === null || x === undefined || !Number.isFinite(x)) return '-';
  const a = Math.abs(x);
  if (a >= 1e15 || (a > 0 && a < 1e-4)) return x.toExponential(2).replace(/\.?0*e/, 'e');
  for (const [size, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']])
    if (a >= size) return +(x / (letter === 'k' ? 1e3 : size)).toPrecision(4) + letter;
  return String(+x.toPrecision(5));
}
function time(seconds) {
  const t = Math.round(seconds);
  if (t < 60) return `${+seconds.toPrecision(3)} s`;
  if (t < 3600) return `${Math.floor(t / 60)}m${String(t % 60).padStart(2, '0')}s`;
  return `${Math.floor(t / 3600)}h${String(Math.floor(t / 60) % 60).padStart(2, '0')}m`;
}
const yText = (curve, y) => curve.unit === 'bytes' ? bytes(y) : short(y);
const xText = (x) => state.x === 'time' ? time(x) : short(x);
const xName = () => ({step: 'step', time: 'time', tokens: 'tokens'})[state.x];

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most), power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw) || raw, list = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && list.length < 50; i++)
    list.push(Math.abs(i * step) < step * 1e-9 ? 0 : i * step);
  return list;
}
// Steps of 1, 2, 4, ... 512 of a unit of bytes.
function byteTicks(low, high, most) {
  const step = Math.pow(2, Math.ceil(Math.log2((high - low) / Math.max(1, most)))), list = [];
  for (let y = Math.ceil(low / step) * step; y <= high && list.length < 50; y += step) list.push(y);
  return list;
}
function logTicks(low, high, most) {
  const list = [], a = Math.floor(Math.log10(low)), b = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((b - a) / most));
  for (let k = a; k <= b; k += every)
    for (const m of b - a <= 2 ? [1, 2, 5] : [1]) {
      const x = m * Math.pow(10, k);
      if (x >= low * 0.999 && x <= high * 1.001) list.push(x);
    }
  return list.length > 1 || high >= 10 * low ? list : ticks(low, high, most);
}

// ---- curves of the runs ----

// Steps come as differences.
function decode(curves) {
  const out = {};
  for (const [name, [steps, values]] of Object.entries(curves)) {
    let at = 0;
    out[name] = {step: steps.map((d) => (at += d)), y: values};
  }
  return out;
}
function elapsed(run, step) {
  const steps = run.elapsed_step, times = run.elapsed;
  let low = 0, high = steps.length - 1;
  if (high < 0) return 0;
  if (step >= steps[high]) return times[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  if (high === low || steps[high] === steps[low]) return times[low];
  return times[low] + (times[high] - times[low]) * Math.max(0, step - steps[low]) / (steps[high] - steps[low]);
}
function prepare(data) {
  data.runs.forEach((run, index) => {
    run.index = index;
    run.color = index % 8;
    run.lines = decode(run.series);
    run.tests = decode(run.evaluations);
  });
  return data;
}
const xOf = (run, step) => state.x === 'tokens' ? step * run.tokens : state.x === 'time' ? elapsed(run, step) : step;
const visible = () => state.data.runs.filter((r) => !state.hidden.has(r.folder));

function smoothed(y, weight) {
  let mean = 0, norm = 0;
  return y.map((v) => {
    if (v === null) return null;
    mean = weight * mean + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

// The lines of a chart: {run, name, x, y, dash, dots, raw}.
function linesOf(curve) {
  const lines = [];
  for (const run of visible()) {
    curve.series.forEach((name, k) => {
      const line = run.lines[name], test = curve.evaluated && run.tests[name];
      const label = run.name + (curve.names ? `, ${curve.names[k]}` : '');
      if (line) {
        const x = line.step.map((step) => xOf(run, step)), smooth = state.smooth > 0 && x.length > 2;
        if (smooth) lines.push({run, name: null, x, y: line.y, raw: true, dash: k});
        lines.push({run, name: label, x, y: smooth ? smoothed(line.y, state.smooth) : line.y, dash: k});
      }
      if (test)
        lines.push({run, name: `${label}, held out`, x: test.step.map((step) => xOf(run, step)), y: test.y, dash: 2,
          dots: true});
    });
  }
  return lines;
}
const hasCurve = (curve) => state.data.runs.some((r) => curve.series.some((n) => r.lines[n]));

function nearest(x, at) {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle; else high = middle;
  }
  return high > low && x[high] - at < at - x[low] ? high : low;
}

// Draws now and whenever the width changes.
function onResize(plot, draw) {
  let width = -1;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (plot.clientWidth === width) return;
    width = plot.clientWidth;
    draw();
  })).observe(plot);
}

// ---- a plot: cursor, tip, keys ----

// `at(px, py)` returns {text, x, y} of the point under the pointer, `move(key)` that after an arrow key; either may
// return null. The text goes to the tip, and to a live region when the keyboard moves.
function interactive(plot, label, handlers) {
  const tip = h('div', {class: 'tip', hidden: true}), live = h('div', {class: 'unseen', 'aria-live': 'polite'});
  add(plot, {tabindex: 0, role: 'group', 'aria-label': label}, [tip, live]);
  const show = (point, spoken) => {
    tip.hidden = !point;
    if (handlers.mark) handlers.mark(point);
    if (!point) return;
    tip.textContent = point.text;
    if (spoken) live.textContent = point.text;
    const left = point.x + 14 + tip.offsetWidth > plot.clientWidth ? point.x - tip.offsetWidth - 14 : point.x + 14;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, Math.min(point.y + 10, plot.clientHeight - tip.offsetHeight))}px`;
  };
  const place = (e) => {
    const box = plot.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  };
  let from = null;
  plot.addEventListener('pointermove', (e) => {
    const [x, y] = place(e);
    if (from !== null && handlers.drag) handlers.drag(from, x);
    show(handlers.at(x, y), false);
  });
  plot.addEventListener('pointerleave', () => { if (from === null) show(null); });
  plot.addEventListener('blur', () => show(null));
  plot.addEventListener('pointerdown', (e) => {
    if (e.button !== 0 || e.pointerType === 'touch' || !handlers.zoom) return;
    from = place(e)[0];
    plot.setPointerCapture(e.pointerId);
  });
  plot.addEventListener('pointerup', (e) => {
    const to = place(e)[0], start = from;
    from = null;
    if (start === null) return;
    handlers.drag(0, 0);
    if (Math.abs(to - start) > 5) handlers.zoom(Math.min(start, to), Math.max(start, to));
  });
  plot.addEventListener('dblclick', () => handlers.reset && handlers.reset());
  plot.addEventListener('keydown', (e) => {
    if (e.ctrlKey || e.altKey || e.metaKey) return;
    const used = handlers.key(e);
    if (used === undefined) return;
    e.preventDefault();
    show(used, true);
  });
}

// ---- a chart of curves ----

class Chart {
  constructor(curve) {
    this.curve = curve;
    this.cursor = null;
    this.plot = h('div', {class: 'plot'});
    this.legend = h('div', {});
    const log = h('input', {type: 'checkbox', on: {change: () => {
      if (log.checked) state.log.add(curve.series[0]); else state.log.delete(curve.series[0]);
      this.draw();
    }}});
    log.checked = state.log.has(curve.series[0]);
    this.table = folded('Table', () => this.makeTable());
    this.node = h('section', {'aria-label': curve.title, id: `chart-${curve.series[0]}`},
      h('div', {class: 'head'}, h('h2', {}, curve.title, curve.unit ? h('small', {}, ` ${curve.unit}`) : null),
        h('label', {class: 'controls muted'}, log, 'log scale')), this.plot, this.legend, this.table);
    interactive(this.plot, `${curve.title}, a chart. Arrow keys read values, plus and minus zoom, 0 shows all, ` +
      'Shift and an arrow move the range.', {
      at: (x) => this.pointAt(this.toX(x)),
      mark: (p) => this.mark(p),
      drag: (a, b) => this.drag(a, b),
      zoom: (a, b) => setRange([this.toX(a), this.toX(b)]),
      reset: () => setRange(null),
      key: (e) => this.key(e),
    });
  }
  toX(px) { return this.low + (px - this.left) / (this.right - this.left) * (this.high - this.low); }
  px(x) { return this.left + (x - this.low) / (this.high - this.low) * (this.right - this.left); }
  py(y) {
    const [a, b, v] = this.isLog ? [Math.log(this.bottom), Math.log(this.top), Math.log(Math.max(y, 1e-300))]
      : [this.bottom, this.top, y];
    return this.foot - (v - a) / (b - a) * (this.foot - this.roof);
  }
  // The range of x and y, from the points that the range of x shows.
  measure() {
    let low = Infinity, high = -Infinity;
    for (const l of this.lines) if (l.x.length) {
      low = Math.min(low, l.x[0]);
      high = Math.max(high, l.x[l.x.length - 1]);
    }
    if (state.range) [low, high] = state.range;
    if (!(high > low)) { low = Number.isFinite(low) ? low - 0.5 : 0; high = low + 1; }
    this.low = low;
    this.high = high;
    let bottom = Infinity, top = -Infinity, positive = true;
    for (const l of this.lines) for (let i = 0; i < l.x.length; i++) {
      const y = l.y[i];
      if (y === null || l.x[i] < low || l.x[i] > high) continue;
      if (y < bottom) bottom = y;
      if (y > top) top = y;
      if (y <= 0) positive = false;
    }
    if (top === -Infinity) { bottom = 0; top = 1; }
    this.isLog = positive && state.log.has(this.curve.series[0]) && top > bottom;
    const space = this.isLog ? 0 : top > bottom ? 0.05 * (top - bottom) : Math.abs(top) * 0.1 || 1;
    this.bottom = this.isLog ? bottom / 1.1 : bottom >= 0 && (bottom < 3 * space || this.curve.unit === 'bytes') ? 0 : bottom - space;
    this.top = this.isLog ? top * 1.1 : top + space;
  }
  path(line) {
    const parts = [];
    let pen = false;
    const first = Math.max(0, nearest(line.x, this.low) - 1), last = nearest(line.x, this.high) + 1;
    for (let i = first; i <= last && i < line.x.length; i++) {
      if (line.y[i] === null) { pen = false; continue; }
      parts.push(`${pen ? 'L' : 'M'}${this.px(line.x[i]).toFixed(1)} ${this.py(line.y[i]).toFixed(1)}`);
      pen = true;
    }
    return parts.join('');
  }
  draw() {
    this.lines = linesOf(this.curve);
    this.measure();
    const width = Math.max(200, this.plot.clientWidth), height = 250, clip = `clip-${this.curve.series[0]}`;
    Object.assign(this, {left: 62, right: width - 10, roof: 8, foot: height - 26});
    const svg = s('svg', {viewBox: `0 0 ${width} ${height}`, height, 'aria-hidden': 'true'});
    svg.append(s('clipPath', {id: clip}, s('rect', {x: this.left, y: this.roof - 4, width: this.right - this.left + 4,
      height: this.foot - this.roof + 8})));
    const scale = this.isLog ? logTicks : this.curve.unit === 'bytes' ? byteTicks : ticks;
    for (const y of scale(this.bottom, this.top, 5))
      svg.append(s('line', {class: 'grid-line', x1: this.left, x2: this.right, y1: this.py(y), y2: this.py(y)}),
        s('text', {x: this.left - 6, y: this.py(y) + 4, 'text-anchor': 'end'}, yText(this.curve, y)));
    for (const x of ticks(this.low, this.high, Math.floor(width / 110)))
      svg.append(s('text', {x: Math.min(this.px(x), width - 18), y: height - 8, 'text-anchor': 'middle'}, xText(x)));
    svg.append(s('line', {class: 'axis', x1: this.left, x2: this.right, y1: this.foot, y2: this.foot}));
    const group = s('g', {'clip-path': `url(#${clip})`});
    for (const l of this.lines) {
      const dash = ['', '6 3', '2 3'][l.dash] || (l.run.index >= 8 ? '10 3 2 3' : '');
      group.append(s('path', {class: `s${l.run.color}${l.raw ? ' raw' : ''}`, d: this.path(l),
        'stroke-dasharray': dash || undefined}));
      if (!l.dots || l.x.length > 80) continue;
      l.x.forEach((x, i) => l.y[i] !== null && group.append(s('circle', {class: `f${l.run.color}`, cx: this.px(x),
        cy: this.py(l.y[i]), r: 3})));
    }
    this.cursorLine = s('line', {class: 'cursor', y1: this.roof, y2: this.foot, x1: -9, x2: -9});
    this.dragBox = s('rect', {class: 'drag', y: this.roof, height: this.foot - this.roof, width: 0});
    svg.append(group, this.cursorLine, this.dragBox);
    const old = this.plot.querySelector('svg');
    if (old) old.replaceWith(svg); else this.plot.prepend(svg);
    this.drawLegend();
    if (this.table.open) this.table.dispatchEvent(new Event('toggle'));
  }
  drawLegend() {
    const named = this.lines.filter((l) => l.name);
    this.legend.replaceChildren(...(named.length > 1 && named.length <= 12 ? named.map((l) => h('span', {class: 'key'},
      swatch(l.run, ['', '6 3', '2 3'][l.dash]), l.name)) : []));
  }
  mark(point) {
    const x = point ? point.x : -9;
    this.cursorLine.setAttribute('x1', x);
    this.cursorLine.setAttribute('x2', x);
  }
  drag(a, b) {
    this.dragBox.setAttribute('x', Math.min(a, b));
    this.dragBox.setAttribute('width', Math.abs(b - a));
  }
  pointAt(x) {
    const at = [], named = this.lines.filter((l) => l.name && l.x.length);
    let best = null;
    for (const l of named) {
      const i = nearest(l.x, x);
      if (best === null || Math.abs(l.x[i] - x) < Math.abs(best - x)) best = l.x[i];
    }
    if (best === null) return null;
    for (const l of named) {
      const i = nearest(l.x, best), far = Math.abs(this.px(l.x[i]) - this.px(best)) > 24;
      if (!far) at.push(`${l.name}: ${yText(this.curve, l.y[i])}`);
    }
    this.cursor = best;
    return {x: this.px(best), y: this.roof, text: `${xName()} ${xText(best)}\n${at.join('\n')}`};
  }
  key(e) {
    const width = this.high - this.low, line = this.lines.find((l) => l.name && l.x.length);
    const zoom = (k) => {
      const middle = this.cursor !== null ? this.cursor : (this.low + this.high) / 2;
      setRange([Math.max(middle - width * k / 2, fullRange()[0]), Math.min(middle + width * k / 2, fullRange()[1])]);
      return this.cursor !== null ? this.pointAt(this.cursor) : null;
    };
    if (e.key === '+' || e.key === '=') return zoom(0.5);
    if (e.key === '-') return zoom(2);
    if (e.key === '0') { setRange(null); return null; }
    if (e.key === 'Escape') return null;
    const direction = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (!direction && e.key !== 'Home' && e.key !== 'End') return undefined;
    if (e.shiftKey && direction) {
      setRange([this.low + direction * width / 4, this.high + direction * width / 4]);
      return null;
    }
    if (!line) return null;
    if (e.key === 'Home') return this.pointAt(this.low);
    if (e.key === 'End') return this.pointAt(this.high);
    if (this.cursor === null) return this.pointAt(direction > 0 ? this.low : this.high);
    // at least four pixels, so that a long curve is read in reasonable time
    let i = nearest(line.x, this.cursor);
    const from = this.px(this.cursor);
    do i += direction; while (i > 0 && i < line.x.length - 1 && Math.abs(this.px(line.x[i]) - from) < 4);
    return this.pointAt(line.x[Math.max(0, Math.min(line.x.length - 1, i))]);
  }
  makeTable() {
    const lines = linesOf(this.curve).filter((l) => l.name && l.x.length), wanted = new Set();
    for (const l of lines) {
      const shown = l.x.filter((x) => x >= this.low && x <= this.high);
      const every = Math.max(1, Math.ceil(shown.length / 30));
      shown.forEach((x, i) => (i % every === 0 || i === shown.length - 1) && wanted.add(x));
    }
    const xs = [...wanted].sort((a, b) => a - b), every = Math.max(1, Math.ceil(xs.length / 60));
    const rows = xs.filter((x, i) => i % every === 0 || i === xs.length - 1).map((x) => [xText(x), ...lines.map((l) => {
      const i = nearest(l.x, x);
      return Math.abs(l.x[i] - x) <= (this.high - this.low) / 60 ? yText(this.curve, l.y[i]) : '';
    })]);
    return table([xName(), ...lines.map((l) => l.name)], rows, () => true);
  }
}

function swatch(run, dash) {
  return s('svg', {class: 'swatch', viewBox: '0 0 30 10', 'aria-hidden': 'true'},
    s('line', {class: `s${run.color}`, x1: 0, x2: 30, y1: 5, y2: 5, 'stroke-width': 3, 'stroke-dasharray':
      dash || (run.index >= 8 ? '10 3 2 3' : undefined)}));
}

let charts = [];
function fullRange() {
  let low = Infinity, high = -Infinity;
  for (const c of charts) for (const l of c.lines) if (l.x.length) {
    low = Math.min(low, l.x[0]);
    high = Math.max(high, l.x[l.x.length - 1]);
  }
  return [low, high];
}
function setRange(range) {
  state.range = range && range[1] > range[0] ? range : null;
  drawCurves();
}
function drawCurves() {
  for (const c of charts) c.draw();
  const reset = document.getElementById('reset');
  if (reset) reset.disabled = !state.range;
}
