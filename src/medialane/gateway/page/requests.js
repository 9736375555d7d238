// The list of requests, its filters, and one request in full.

import {ago, bytes, count, find, head, list, make, mark, ms, percent, plural, say, shortName, show, size, write} from './draw.js';
import {PART, spent, waitsFor} from './steps.js';

/** Rows that are drawn; the heading says how many there are. */
const MOST_ROWS = 24;
export const SLOW_MS = 1000;

const rows = find('#request-rows');
const form = find('#filters');
const detail = find('#detail');

/** The longest a first token took, or, without one, all of it. */
export const waited = (view) => view.ttft_ms ?? view.total_ms;
export const isSlow = (view) => waited(view) >= SLOW_MS;
export const isFailed = (view) => Boolean(view.error);

/** What is chosen in the form, as the API names it. */
export function filters() {
  const data = new FormData(form);
  return {
    text: (data.get('text') ?? '').trim(), model: data.get('model'), tenant: data.get('tenant'), modality: data.get('modality'),
    worker: data.get('worker'), slow: data.has('slow'), failed: data.has('failed'),
  };
}

export const isFiltered = () => Object.values(filters()).some(Boolean);

export function clearFilters() {
  form.reset();
  form.dispatchEvent(new Event('input', {bubbles: true}));
}

export function wants(view, wanted) {
  if (wanted.model && view.model !== wanted.model) return false;
  if (wanted.tenant && view.tenant !== wanted.tenant) return false;
  if (wanted.worker && !(view.attempts ?? []).some((each) => each.worker === wanted.worker)) return false;
  if (wanted.modality && !hasModality(view, wanted.modality)) return false;
  if (wanted.slow && !isSlow(view)) return false;
  if (wanted.failed && !isFailed(view)) return false;
  return !wanted.text || said(view).includes(wanted.text.toLowerCase());
}

const hasModality = (view, modality) =>
  (modality === 'text' ? view.num_items === 0 : view.items.some((item) => item.modality === modality));

const said = (view) => [view.id, view.model, view.tenant, view.worker, view.error?.code, view.path,
  ...view.items.map((item) => item.origin)].filter(Boolean).join(' ').toLowerCase();

/** Offer the present values; a choice stays, even if no request has it now. */
export function offer(name, values, all) {
  const select = form.elements[name];
  const wanted = [...new Set([...values, select.value].filter(Boolean))].sort();
  const old = [...select.options].slice(1).map((option) => option.value);
  if (wanted.length !== old.length || wanted.some((value, i) => value !== old[i])) {
    const chosen = select.value;
    select.replaceChildren(make('option', {value: ''}, all), ...wanted.map((value) => make('option', {value}, value)));
    select.value = chosen;
  }
  select.classList.toggle('set', Boolean(select.value));
}

head(rows, 'Started', 'Tenant', 'Media', 'Where its time went', 'Total>', 'Now', 'Worker');
/** The end of the bars' scale. */
const tick = make('span', {class: 'tick'});
rows.head.children[3].append(tick);

let shown = [];
let selected = null;

/** Names of workers that do not respond. */
let silent = new Set();

/** Draw some requests. `live` is how many run (null: unknown), `now` the server's time in s. */
export function drawRequests(views, {live, now, silent: workers}) {
  silent = workers;
  shown = views.slice(0, MOST_ROWS);
  const scale = scaleOf(shown);
  write(tick, ms(scale).replace('.0', ''));
  list(rows, shown, keyOf, buildRow, (row, view) => fillRow(row, view, scale, now));
  const note = live === null ? `${plural(views.length, 'request')} found` : `${count(live)} in flight, then the latest that have ended`;
  write(find('#requests-note'), shown.length ? `${note}${live === null && views.length > shown.length ? `, ${shown.length} shown` : ''}` : '');
  show(rows.head, shown.length > 0);
  show(find('#requests-empty'), !shown.length);
  write(find('#requests-empty'), isFiltered() ? 'No request passes the filter. Esc clears it.'
    : 'No requests yet. Send one to /v1/chat/completions, and it appears here while it runs.');
}

export const keyOf = (view) => `${view.gateway} ${view.id} ${view.received_at}`;

/** Bars have one scale, up to a round time, so that long requests are long; few that are far longer than the others are cut. */
function scaleOf(views) {
  const totals = views.map((view) => view.total_ms).sort((a, b) => a - b);
  const least = 1.1 * (totals[Math.floor(0.85 * (totals.length - 1))] || 1);
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= least);
}

function buildRow(view) {
  const row = make('div', {class: 'row', role: 'option', 'data-id': view.id},
    make('span', {class: 'muted num'}), make('span', {class: 'cut'}), make('span', {class: 'cut muted media'}),
    make('span', {class: 'bar'}), make('span', {class: 'num'}), make('span', {class: 'cut now'}), make('span', {class: 'cut muted worker'}));
  row.firstChild.classList.remove('num');
  row.addEventListener('click', () => openDetail(row.view));
  return row;
}

function fillRow(row, view, scale, now) {
  row.view = view;
  const [started, tenant, media, bar, total, state, worker] = row.children;
  write(started, view.stage ? ago(view.total_ms / 1000) : ago(Math.max(0, now - view.received_at)));
  write(tenant, view.tenant ?? '–');
  say(tenant, view.tenant ?? 'no key');
  write(media, mediaText(view));
  drawBar(bar, spent(view), view.total_ms, view.total_ms / scale);
  write(total, ms(view.total_ms));
  const [text, kind] = stateOf(view);
  write(state, text);
  mark(state, `cut now ${kind}`);
  say(state, view.stage || view.ttft_ms === null ? text : `${text}, first token after ${ms(view.ttft_ms)}`);
  write(worker, shortName(view.worker ?? ''));
  say(worker, view.worker ?? '');
  row.classList.toggle('ended', !view.stage);
  const isSelected = selected !== null && keyOf(selected) === keyOf(view);
  if (row.getAttribute('aria-selected') !== String(isSelected)) row.setAttribute('aria-selected', isSelected);
}

function stateOf(view) {
  if (view.error) return [view.error.code.replaceAll('_', ' '), 'bad'];
  if (!view.stage) return ['done', ''];
  if (silent.has(view.worker)) return ['worker silent', 'bad'];
  const current = spent(view).find((each) => each.isRunning);
  const isLong = view.stage !== 'answer' && current?.ms >= SLOW_MS;
  return [`${waitsFor(view.stage)} ${current && view.stage !== 'answer' ? ms(current.ms) : ''}`, isLong ? 'trouble' : ''];
}

/** 2 images, 1 new. */
function mediaText(view) {
  if (!view.num_items) return 'text';
  const modalities = new Set(view.items.map((item) => item.modality));
  const only = modalities.size === 1 ? [...modalities][0] : 'item';
  const noun = only === 'document' && view.items[0].pages ? 'page' : only;
  const fresh = view.items.reduce((sum, item) => sum + (item.pages ? item.pages.new ?? 0 : item.outcome === 'new'), 0);
  const name = view.num_items === 1 ? noun : `${count(view.num_items)} ${noun}${noun === 'audio' ? '' : 's'}`;
  return fresh ? `${name}, ${fresh === view.num_items ? 'new' : `${fresh} new`}` : name;
}

/** Parts of a bar: `share` of it is the total; what is above 1 is cut. */
function drawBar(bar, parts, total, share) {
  bar.classList.toggle('over', share > 1);
  const sum = Math.max(total, parts.reduce((all, part) => all + part.ms, 0)) || 1;
  while (bar.children.length > parts.length) bar.lastChild.remove();
  while (bar.children.length < parts.length) bar.append(make('i'));
  parts.forEach((part, i) => {
    const piece = bar.children[i];
    mark(piece, `step-${part.name}${part.isRunning && part.name !== 'answer' ? ' running' : ''}`);
    size(piece, 'width', `${(100 * share * part.ms / sum).toFixed(1)}%`);
  });
  say(bar, parts.map((part) => `${PART[part.name].title} ${ms(part.ms)}`).join(' · '));
}

export const shownRequest = () => selected;

export function openDetail(view) {
  selected = view;
  show(detail, true);
  drawDetail(view);
  for (const row of rows.querySelectorAll('.row:not(.head)')) {
    row.setAttribute('aria-selected', keyOf(row.view) === keyOf(view));
  }
  document.dispatchEvent(new CustomEvent('opened'));
}

export function closeDetail() {
  if (detail.hidden) return false;
  selected = null;
  show(detail, false);
  for (const row of rows.querySelectorAll('[aria-selected="true"]')) row.setAttribute('aria-selected', false);
  return true;
}

/** Select the next or previous row. */
export function step(by) {
  if (!shown.length) return;
  const at = selected === null ? -1 : shown.findIndex((view) => keyOf(view) === keyOf(selected));
  const next = at < 0 ? (by > 0 ? 0 : shown.length - 1) : Math.min(shown.length - 1, Math.max(0, at + by));
  openDetail(shown[next]);
  rows.rows.get(keyOf(shown[next]))?.scrollIntoView({block: 'nearest'});
}

export function drawDetail(view) {
  if (selected === null || keyOf(view) !== keyOf(selected)) return;
  write(find('#detail-title'), view.id);
  const body = find('#detail-body');
  const top = body.scrollTop;
  body.replaceChildren(...[facts(view), view.error && errorBox(view.error), fall(view), items(view), choices(view)].filter(Boolean));
  body.scrollTop = top;
}

function facts(view) {
  const prompt = view.prompt_tokens === null ? null
    : `${plural(view.prompt_tokens, 'token')}${view.cached_tokens === null ? '' : `, ${percent(view.cached_tokens / Math.max(1, view.prompt_tokens))} from the KV cache`}`;
  const lines = [
    ['State', view.error ? `failed${view.status ? ` with ${view.status}` : ''}` : view.stage ? `${waitsFor(view.stage)}, so far ${ms(view.total_ms)}` : `done in ${ms(view.total_ms)}`],
    ['First token', view.ttft_ms === null ? null : `${view.generated_tokens || !view.stage ? 'after' : 'not yet, waiting for'} ${ms(view.ttft_ms)}`],
    ['Tenant', view.tenant], ['Model', view.model], ['Endpoint', view.path],
    ['Worker', (view.attempts ?? []).map((each) => [each.worker + (each.rank ? ` rank ${each.rank}` : ''),
      each.transport && `${each.stage} by ${each.transport}`, each.error && `(${each.error})`].filter(Boolean).join(' ')).join(', then ')],
    ['Prompt', prompt],
    ['Prefill', view.prefill?.outcome === 'split' ? `by ${shortName(view.prefill.worker)} in ${ms(view.prefill.ms)}, ${plural(view.prefill.transferred_tokens ?? 0, 'token')} transferred` : view.prefill?.outcome],
    ['Answer', view.generated_tokens ? plural(view.generated_tokens, 'token') : null],
    ['Received', `${new Date(view.received_at * 1000).toLocaleTimeString()} by gateway ${view.gateway}`],
  ];
  return make('dl', {class: 'facts'}, ...lines.filter(([, value]) => value).flatMap(([name, value]) =>
    [make('dt', {}, name), make('dd', {}, value)]));
}

const errorBox = (error) => make('p', {class: 'error-box'}, make('b', {}, error.code), error.reason ? `: ${error.reason}` : '');

/** The steps one below the other, each where the ones before it end. */
function fall(view) {
  const parts = spent(view);
  if (!parts.length) return null;
  const sum = parts.reduce((all, part) => all + part.ms, 0) || 1;
  let before = 0;
  const lines = parts.flatMap((part) => {
    const piece = make('i', {class: `step-${part.name}`});
    piece.style.left = `${(100 * before) / sum}%`;
    piece.style.width = `${(100 * part.ms) / sum}%`;
    before += part.ms;
    return [make('span', {}, PART[part.name].title), make('span', {class: 'track'}, piece),
      make('span', {class: part.isRunning ? 'num trouble' : 'num'}, `${ms(part.ms)}${part.isRunning ? ' …' : ''}`)];
  });
  return make('div', {}, make('h3', {}, 'Steps'), make('div', {class: 'fall'}, ...lines));
}

const OUTCOMES = {hit: 'cached', shared: 'made for another request at the same time', new: 'new, prepared', sent: 'sent as it is', pending: 'not ready'};

const numPages = (item) => (item.pages ? Object.values(item.pages).reduce((sum, number) => sum + number, 0) : 1);

function items(view) {
  if (!view.num_items) return null;
  const lines = view.items.map((item) => {
    const length = item.frames ? plural(item.frames, 'frame') : item.samples ? plural(item.samples, 'sample') : null;
    const pages = Object.entries(item.pages ?? {}).map(([outcome, number]) => `${plural(number, 'page')} ${OUTCOMES[outcome]}`);
    const known = [...pages, item.width && `${item.width} × ${item.height}`, length, item.bytes && bytes(item.bytes),
      item.tokens && plural(item.tokens, 'token'), item.feature_bytes && `${bytes(item.feature_bytes)} of tensors`];
    const bar = make('span', {class: 'bar'});
    drawBar(bar, spent(item), 0, 1);
    const times = spent(item).map((part) => `${PART[part.name].title.toLowerCase()} ${ms(part.ms)}`).join(', ');
    return make('div', {class: 'item'},
      make('p', {class: 'top'}, make('b', {}, item.modality), make('span', {class: item.outcome === 'new' ? '' : 'muted'},
        [OUTCOMES[item.outcome] ?? (item.stage ? waitsFor(item.stage) : null), item.embedding && `embedding ${item.embedding}`].filter(Boolean).join(', '))),
      make('p', {class: 'muted'}, [item.origin ? `from ${item.origin}` : item.source === 'body' ? 'in the body' : item.source,
        ...known, item.hash].filter(Boolean).join(' · ')),
      bar.children.length ? bar : null, times ? make('p', {class: 'muted'}, times) : null);
  });
  const more = view.num_items - view.items.reduce((sum, item) => sum + numPages(item), 0);
  return make('div', {}, make('h3', {}, plural(view.num_items, 'media item')), ...lines, more > 0 ? make('p', {class: 'muted'}, `and ${more} more`) : null);
}

/** Why the worker was chosen, and what the next best would have cost. */
function choices(view) {
  const decision = view.decision;
  if (!decision) return null;
  return make('div', {}, make('h3', {}, `Routing: ${decision.reason ?? ''}. Expected cost, the lowest wins:`), ...choiceLines(decision));
}

/** What the choice of a worker was compared by, in ms. */
export const costOf = (decision) => Object.values(decision.cost_ms ?? {}).reduce((all, part) => all + part, 0);

/** A cost beside the choice's. */
export const costText = (cost, chosen) => (ms(cost) === ms(chosen) ? 'equal' : ms(cost));

function choiceLines(decision) {
  const all = [{worker_id: decision.worker, score: costOf(decision), cached_tokens: decision.cached_tokens}, ...(decision.alternatives ?? [])];
  const most = Math.max(...all.map((each) => each.score), 1e-9);
  return all.map((each, i) => {
    const bar = make('span', {class: i ? 'meter other' : 'meter'}, make('i'));
    bar.firstChild.style.width = `${(100 * each.score) / most}%`;
    return make('div', {class: 'choice', title: each.cached_tokens ? `${count(each.cached_tokens)} tokens cached` : ''},
      make('span', {class: i ? 'cut muted' : 'cut'}, shortName(each.worker_id)), bar, make('span', {class: 'num muted'}, i ? costText(each.score, all[0].score) : ms(each.score)));
  });
}
