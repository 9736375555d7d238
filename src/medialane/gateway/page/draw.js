// Elements, numbers and charts. Data become text nodes alone: nothing here parses HTML.

const SVG = 'http://www.w3.org/2000/svg';

/** An element: `make('p', {class: 'muted'}, 'text', child)`. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

export const find = (selector, within = document) => within.querySelector(selector);

/** Set a text, a class, a title or a style only where it differs: an unchanged page costs no layout. */
export function write(node, text) {
  const wanted = text === null || text === undefined ? '' : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function mark(node, name) {
  if (node.className !== name) node.className = name;
}

export function say(node, title) {
  if (node.title !== title) node.title = title;
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

export function size(node, property, value) {
  if (node.style[property] !== value) node.style[property] = value;
}

/** Give `parent` one child per item of `items`, reusing nodes by key: `build` makes one, `fill` writes it. */
export function list(parent, items, key, build, fill) {
  const old = parent.rows ?? new Map();
  const rows = new Map();
  let before = parent.head ?? null;
  for (const item of items) {
    const name = String(key(item));
    if (rows.has(name)) continue;
    const node = old.get(name) ?? build(item);
    old.delete(name);
    rows.set(name, node);
    const next = before ? before.nextSibling : parent.firstChild;
    if (node !== next) parent.insertBefore(node, next);
    fill(node, item);
    before = node;
  }
  for (const node of old.values()) node.remove();
  parent.rows = rows;
}

/** Titles of columns, above the rows of `list`. */
export function head(parent, ...titles) {
  parent.head = make('div', {class: 'row head'}, ...titles.map((title) =>
    title.endsWith('>') ? make('span', {class: 'num'}, title.slice(0, -1)) : make('span', {class: 'cut'}, title)));
  parent.append(parent.head);
}

const NONE = '–';

/** 4.2 ms, 310 ms, 4.20 s, 12.3 s, 5 min. */
export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.05) return '0 ms';
  if (value < 9.95) return `${value.toFixed(1)} ms`;
  if (value < 999.5) return `${value.toFixed(0)} ms`;
  if (value < 99950) return `${(value / 1000).toFixed(1)} s`;
  return value < 5400e3 ? `${Math.round(value / 60e3)} min` : `${Math.round(value / 3600e3)} h`;
}

export function ago(seconds) {
  return seconds < 1 ? 'now' : seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const [unit, factor] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]]) {
    if (value >= factor) return `${short(value / factor)} ${unit}`;
  }
  return `${value} B`;
}

const short = (value) => (value >= 99.5 ? value.toFixed(0) : value >= 9.95 ? value.toFixed(0) : value.toFixed(1));

/** 0.4, 12, 1,234, 15.6k, 2.1M. */
export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 9.995e5) return `${short(value / 1e6)}M`;
  if (value >= 9999.5) return `${short(value / 1e3)}k`;
  if (value >= 999.5) return Math.round(value).toLocaleString('en');
  return Number.isInteger(value) || value >= 9.95 ? value.toFixed(0) : value.toFixed(1);
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  return value > 0 && value < 0.005 ? '<1 %' : `${Math.round(value * 100)} %`;
}

export function plural(number, noun, nouns = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : nouns}`;
}

/** What all names of workers begin and end with, if they are long: rows show what is between. */
const shared = {start: 0, end: 0};

export function nameWorkers(workers) {
  const names = workers.map((worker) => worker.name);
  shared.start = shared.end = 0;
  if (names.length < 2 || Math.max(...names.map((name) => name.length)) <= 16) return;
  const [first, ...others] = names;
  const same = (at) => others.every((name) => name.at(at) === first.at(at));
  while (shared.start < first.length && same(shared.start)) shared.start++;
  while (shared.end < first.length - shared.start && same(-1 - shared.end)) shared.end++;
  // Whole words: of -0012 and -0013 more than a digit.
  shared.start = Math.max(0, first.slice(0, shared.start).search(/[^-._/:]*$/));
  shared.end -= Math.max(0, first.slice(first.length - shared.end).search(/[-._/:]|$/));
}

export function shortName(name) {
  if (!name || shared.start + shared.end < 6) return name;
  return `${shared.start ? '…' : ''}${name.slice(shared.start, name.length - shared.end)}${shared.end ? '…' : ''}`;
}

/** A share of a bar, 0 to 1. */
export function meter(node, share, isFull) {
  mark(node, isFull ? 'meter full' : 'meter');
  if (!node.firstChild) node.append(make('i'));
  size(node.firstChild, 'width', `${Math.round(100 * Math.min(1, Math.max(0, share || 0)))}%`);
}

/** A chart of the last minutes. `fill` draws series over the same times: `area` fills below the first, `fault` is the
 * height of red bars from the ground. Points that are null leave a gap. */
export class Chart {
  constructor(parent, title, unit) {
    this.unit = unit;
    this.svg = shape('svg', {viewBox: '0 0 300 56', preserveAspectRatio: 'none', role: 'img', 'aria-label': title});
    this.parts = {};
    for (const [name, tag] of [['rule', 'path'], ['area', 'path'], ['fault', 'path'], ['second', 'path'], ['main', 'path'], ['here', 'path']]) {
      this.parts[name] = shape(tag, {class: name, d: ''});
      this.svg.append(this.parts[name]);
    }
    this.at = make('span', {class: 'at'});
    this.value = make('p', {class: 'value'});
    this.from = make('span');
    this.top = make('span');
    parent.append(make('div', {class: 'chart'},
      make('h3', {}, title, this.at), this.value, this.svg,
      make('div', {class: 'axis'}, this.from, this.top, make('span', {}, 'now'))));
    this.svg.addEventListener('pointermove', (event) => this.point(event));
    this.svg.addEventListener('pointerleave', () => { this.hover = null; this.text(); });
  }

  /** `series`: {main, second, fault}: arrays of equal length; `describe(i)` is [value, note] at a point. */
  fill(series, describe, format) {
    this.series = series;
    this.describe = describe;
    const all = [series.main, series.second ?? [], series.fault ?? []].flat().filter((value) => value !== null);
    const most = series.most ?? Math.max(1e-9, ...all);
    const y = (value) => 54 - 50 * Math.min(1, value / most);
    const n = Math.max(1, series.main.length - 1);
    const x = (i) => (300 * i) / n;
    const line = (values) => {
      let drawn = '', pen = 'M';
      values.forEach((value, i) => {
        if (value === null) { pen = 'M'; return; }
        drawn += `${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}${pen === 'M' ? 'h.1' : ''}`; // a point alone is a dot
        pen = 'L';
      });
      return drawn;
    };
    const set = (name, d) => this.parts[name].setAttribute('d', d);
    set('rule', 'M0 54H300');
    set('main', line(series.main));
    set('second', line(series.second ?? []));
    set('area', series.area === false ? '' : areas(series.main, x, y));
    set('fault', (series.fault ?? []).map((value, i) =>
      value ? `M${(x(i) - 1).toFixed(1)} 54V${Math.min(51, y(value)).toFixed(1)}h2V54Z` : '').join(''));
    write(this.from, `${Math.round(((n + 2) * series.step_s) / 60)} min ago`);
    write(this.top, most > 1e-9 && all.length ? `top ${format(most)}` : '');
    this.text();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const n = this.series?.main.length ?? 0;
    if (n > 1) this.hover = Math.round(((event.clientX - box.left) / box.width) * (n - 1));
    this.text();
  }

  text() {
    if (!this.series) return;
    const n = this.series.main.length;
    const at = this.hover === null || this.hover === undefined ? n - 1 : Math.min(n - 1, Math.max(0, this.hover));
    const [value, note] = n ? this.describe(at) : [NONE, ''];
    this.value.replaceChildren(`${value} `, make('small', {}, note));
    const isNow = at === n - 1;
    write(this.at, isNow ? '' : ago((n - 1 - at) * this.series.step_s));
    this.parts.here.setAttribute('d', isNow ? '' : `M${(300 * at) / (n - 1)} 0V54`);
  }
}

function areas(values, x, y) {
  let drawn = '', start = null;
  const close = (i) => { if (start !== null) drawn += `L${x(i).toFixed(1)} 54L${x(start).toFixed(1)} 54Z`; start = null; };
  values.forEach((value, i) => {
    if (value === null) return close(i - 1);
    drawn += `${start === null ? 'M' : 'L'}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    start ??= i;
  });
  close(values.length - 1);
  return drawn;
}
