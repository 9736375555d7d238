// The page: the state, asked for every second, and the sections that it fills. What is drawn is bounded whatever the load:
// one drawing a second, of at most some dozens of rows in each section.

import {Chart, ago, bytes, count, find, head, list, make, mark, meter, ms, nameWorkers, percent, plural, say, shortName, show, size, write} from './draw.js';
import {findings, silence, times, watchPauses, worstFirst} from './findings.js';
import * as requests from './requests.js';
import {CELLS, LANES, PART, PARTS, cellOf, spent} from './steps.js';

/** Rows of each section: the worst or the latest. */
const MOST_WORKERS = 8, MOST_DECISIONS = 6, MOST_PROBLEMS = 6, MOST_SENDERS = 5;
/** From this many workers on there is a map; workers that need attention come first. */
const MAP_FROM = 9;
const STALE_S = 4, RETRY_S = [0.5, 1, 2, 3], DETAIL_S = 1, POLL_S = 2, DRAW_S = 1;
const LEAST_MINUTES = 2, LONG_MS = 1000, ANSWER_MS = 5000;
/** Number of requests that are asked for; more where only the page can select the wanted ones. */
const ASKED = 60, SEARCHED = 400;

/** `latest` are the requests last asked for, `state` the state last drawn, `next` the one last received. If there are
    several models, `answer` has the states of all, `model` is the name of the one that is shown, and `served` the one by
    which it is asked. `key` is the admin key: it is nowhere else, and is sent with each question. */
const page = {answer: null, model: null, served: null, state: null, next: null, latest: [], isPaused: false, key: '', turn: 0, asked: 0, heardAt: 0, retries: 0, isGone: false};
/** Times in which workers did not respond: name -> [{at, seconds}], seconds null while it lasts. */
const pauses = new Map();
/** What was seen last of each worker's requests: name -> {at, marks}. */
const progress = new Map();

// ---- connection

/** Ask the gateway: {status, body}. The status is 0 if it is gone, the body null if it is no JSON. */
async function ask(path) {
  let status = 0;
  try {
    const headers = page.key ? {authorization: `Bearer ${page.key}`} : {};
    const answer = await fetch(path, {cache: 'no-store', signal: AbortSignal.timeout(ANSWER_MS), headers});
    status = answer.status;
    return {status, body: await answer.json()};
  } catch {
    return {status, body: null};
  }
}

const reason = ({status, body}) => body?.error?.message ?? (status ? `The gateway answers ${status}.` : 'The gateway does not answer.');

/** Ask for the state, again and again. */
async function poll() {
  clearTimeout(page.timer);
  const asked = ++page.asked;
  const answer = await ask('state');
  if (asked !== page.asked) return; // with another key
  if (answer.status === 401 || (answer.status === 403 && page.key)) return askForKey(page.key && 'This is not the admin key.');
  if (answer.status === 403 || answer.status === 404) return showFirst(reason(answer));
  if (answer.status !== 200 || !answer.body) return retry();
  const isBack = page.isGone || !page.answer;
  page.retries = 0;
  received(answer.body);
  if (isBack) askForRequests();
  page.timer = setTimeout(poll, 1000 * DRAW_S);
}

function retry() {
  page.isGone = true;
  showLink();
  const wait = RETRY_S[Math.min(page.retries++, RETRY_S.length - 1)];
  page.timer = setTimeout(poll, 1000 * wait);
}

function received(answer) {
  page.isGone = false;
  page.heardAt = performance.now();
  page.answer = answer;
  const state = page.next = stateIn(answer);
  if (!state) return showWaiting();
  watchProgress(state);
  watchPauses(state, pauses);
  if (!page.state) draw();
}

// ---- several models

/** The state of the model that is shown: of the one that was chosen, otherwise of the first that serves. */
function stateIn(answer) {
  show(find('#models'), Boolean(answer.models));
  if (!answer.models) return answer;
  const named = answer.models.find(({name}) => name === page.model);
  const shown = named ?? answer.models.find(({state}) => state) ?? answer.models[0];
  page.model = shown.name;
  page.served = shown.names[0];
  drawModels(answer.models);
  return shown.state;
}

function drawModels(models) {
  const build = () => make('button', {type: 'button'}, make('span', {class: 'dot'}), make('b', {class: 'cut'}), make('span', {class: 'muted'}));
  list(find('#models'), models, ({name}) => name, build, (node, {name, state}) => {
    const {num, states, running, waiting} = state?.workers ?? {num: 0, states: {}};
    const ready = states.ready ?? 0;
    const [, title, text] = node.children;
    mark(node, !ready ? 'bad' : ready < num ? 'trouble' : '');
    node.setAttribute('aria-pressed', name === page.model);
    write(title, name);
    write(text, !state ? 'does not answer' : [`${count(ready)} of ${plural(num, 'worker')}`, `${count(running)} running`, waiting ? `${count(waiting)} waiting` : null].filter(Boolean).join(' · '));
    node.onclick = () => choose(name);
  });
}

function choose(name) {
  page.model = name;
  page.state = null;
  page.latest = [];
  pauses.clear();
  progress.clear();
  close();
  received(page.answer);
  askForRequests();
}

/** Say that the model that is shown does not serve. */
function showWaiting() {
  page.state = null;
  show(find('#content'), false);
  show(find('#first'), true);
  show(find('#login'), false);
  mark(find('#link'), 'live');
  write(find('#link-text'), 'live');
  write(find('#first-text'), `${page.model} is starting, or its gateways do not run.`);
}

/** Ask for the latest requests that pass the filter, once and then again and again. */
async function askForRequests() {
  clearTimeout(page.asking);
  const turn = ++page.turn;
  if (document.hidden) {
    page.asking = setTimeout(askForRequests, 1000 * POLL_S);
    return;
  }
  const wanted = requests.filters();
  const query = new URLSearchParams({limit: wanted.text ? SEARCHED : ASKED});
  for (const name of ['model', 'tenant', 'worker', 'modality']) if (wanted[name]) query.set(name, wanted[name]);
  if (page.served && !wanted.model) query.set('model', page.served);
  if (wanted.slow) query.set('slow', requests.SLOW_MS);
  if (wanted.failed) query.set('failed', true);
  if (!requests.isFiltered()) query.set('live', false); // the state has the running ones
  const {status, body} = await ask(`requests?${query}`);
  if (turn !== page.turn) return; // the filter has changed since
  if (!page.isGone) page.asking = setTimeout(askForRequests, 1000 * POLL_S);
  if (status !== 200 || !body) return; // if the gateway is gone, the next state says so
  page.latest = body.requests;
  if (page.state && !page.isPaused) drawRequests();
}

// ---- the key

/** Show a text, or the form for the key, instead of the content. */
function showFirst(text, isLogin = false) {
  page.isGone = false;
  page.state = page.answer = null;
  clearTimeout(page.asking);
  close();
  mark(document.body, '');
  mark(find('#link'), '');
  write(find('#link-text'), isLogin ? 'key needed' : 'not allowed');
  show(find('#content'), false);
  show(find('#first'), true);
  show(find('#login'), isLogin);
  write(find('#first-text'), text);
}

function askForKey(message) {
  page.key = '';
  showFirst('', true);
  write(find('#login-error'), message);
  find('#key').focus();
}

find('#login').addEventListener('submit', (event) => {
  event.preventDefault();
  const key = find('#key').value.trim();
  find('#key').value = '';
  if (!/^[ -~]+$/.test(key)) return askForKey('This is not the admin key.'); // no header can have it
  page.key = key;
  showFirst('Waiting for the gateway.');
  poll();
});

// ---- drawing

setInterval(() => {
  if (page.next !== page.state && !page.isPaused && !document.hidden) draw();
  showLink();
}, 1000 * DRAW_S);

function draw() {
  page.state = page.next;
  nameWorkers(page.state.workers.listed);
  if (find('#content').hidden) {
    show(find('#content'), true);
    show(find('#first'), false);
  }
  for (const part of [drawHeader, drawFindings, drawSteps, drawCharts, drawRequests, drawWorkers, drawDecisions, drawMedia, drawCaches, drawSenders, drawProblems, showLink]) part();
}

function showLink() {
  const age = (performance.now() - page.heardAt) / 1000;
  const isStale = page.isGone || (page.state !== null && age > STALE_S);
  if (!page.state && !page.isGone) return;
  mark(document.body, isStale ? 'stale' : '');
  mark(find('#link'), isStale ? 'gone' : page.isPaused ? 'paused' : 'live');
  const text = !isStale ? (page.isPaused ? 'paused' : 'live')
    : page.state ? `gateway does not answer, last heard ${age < 1.5 ? 'a second ago' : ago(age)}; trying again` : 'gateway does not answer; trying again';
  write(find('#link-text'), text);
  if (!page.state) write(find('#first-text'), 'The gateway does not answer. This page connects by itself when it is back.');
}

function drawHeader() {
  const {model, gateways, workers, encoders} = page.state;
  write(find('#serving'), [model, plural(workers.num, 'worker'), encoders.num ? plural(encoders.num, 'encoder') : null,
    gateways.length > 1 ? plural(gateways.length, 'gateway') : null].filter(Boolean).join(' · '));
  document.title = `medialane · ${model}`;
}

/** Note since when nothing has changed of a worker's requests that are listed: no token, no end. New ones say nothing. */
function watchProgress({workers: {listed}, live, time}) {
  const now = new Map(listed.map((worker) => [worker.name, new Map()]));
  for (const view of live.listed) now.get(view.worker)?.set(requests.keyOf(view), `${view.stage} ${view.generated_tokens}`);
  for (const worker of listed) {
    const before = progress.get(worker.name);
    const marks = now.get(worker.name);
    const isSilent = before?.marks.size && [...before.marks].every(([key, mark]) => marks.get(key) === mark);
    const at = isSilent ? before.at : time;
    progress.set(worker.name, {at, marks});
    worker.silent_ms = marks.size ? 1000 * (time - at) : 0;
  }
}

function drawFindings() {
  list(find('#findings ul'), findings(page.state), (each) => each.subject, () =>
    make('li', {}, make('span', {class: 'dot'}), make('p', {}, make('b'), make('span'), make('button', {type: 'button'}, 'Show its requests'))), (node, each) => {
    mark(node, each.level);
    const [subject, text, button] = node.lastChild.children;
    write(subject, each.subject);
    write(text, `${each.subject && ' '}${each.text}.`);
    show(button, Boolean(each.filter));
    button.onclick = () => showOnly(each.filter);
  });
}

function showOnly(filter) {
  const form = find('#filters');
  form.reset();
  for (const [name, value] of Object.entries(filter)) {
    const field = form.elements[name];
    if (field.type === 'checkbox') field.checked = value;
    else {
      if (field.tagName === 'SELECT' && ![...field.options].some((option) => option.value === value)) field.append(make('option', {value}, value));
      field.value = value;
    }
  }
  filterChanged();
  find('#requests').scrollIntoView({block: 'nearest'});
}

const cells = new Map();
for (const lane of LANES) {
  const box = make('div', {class: 'lane'}, make('h3', {}, lane.title));
  const inside = make('div');
  for (const cell of lane.cells) {
    const names = make('div', {class: 'name'}, ...cell.parts.map((name) =>
      make('span', {class: 'part', title: PART[name].text}, make('i', {class: `swatch step-${name}`}), PART[name].title)));
    const node = make('div', {class: 'step', 'data-cell': cell.name}, names, make('div', {class: 'count'}), make('div', {class: 'level'}, make('i', {class: `step-${cell.parts.at(-1)}`})), make('div', {class: 'time'}));
    cells.set(cell.name, node);
    inside.append(node);
  }
  box.append(inside);
  find('.lanes').append(box);
}

function drawSteps() {
  const {num, stages} = page.state.live;
  const here = Object.fromEntries(CELLS.map((cell) => [cell.name, {num: 0, oldest_ms: 0}]));
  for (const [name, step] of Object.entries(stages)) {
    const cell = here[cellOf(name)];
    cell.num += step.num;
    cell.oldest_ms = Math.max(cell.oldest_ms, step.oldest_ms);
  }
  const most = Math.max(1, ...Object.values(here).map((cell) => cell.num));
  for (const cell of CELLS) {
    const {num: inside, oldest_ms: oldest} = here[cell.name];
    const [, number, level, time] = cells.get(cell.name).children;
    write(number, count(inside));
    mark(number, inside ? 'count' : 'count none');
    size(level.firstChild, 'width', `${(100 * inside) / most}%`);
    const isLong = cell.name !== 'answer' && oldest > LONG_MS;
    mark(time, isLong ? 'time trouble' : 'time');
    write(time, isLong ? `longest ${ms(oldest)}` : typical(page.latest, cell));
  }
  write(find('#steps-note'), `${plural(num, 'request')} in flight`);
}

/** The median of each part of a cell. */
function typical(views, cell) {
  return cell.parts.map((name) => {
    const times = views.map((view) => spent(view).find((part) => part.name === name)?.ms).filter((value) => value !== undefined).sort((a, b) => a - b);
    return times.length ? ms(times[Math.floor(times.length / 2)]) : null;
  }).filter(Boolean).join(' · ') || '–';
}

const charts = Object.fromEntries([['requests', 'Requests'], ['ttft', 'TTFT p95, 5 s'], ['cache', 'Media already cached'], ['tokens', 'Tokens generated']]
  .map(([name, title]) => [name, new Chart(find('#charts'), title)]));

function drawCharts() {
  const {rates, gateways, time} = page.state;
  const step = rates.step_s;
  const started = Math.min(...gateways.map((gateway) => gateway.started_at ?? time));
  const minutes = Math.max(LEAST_MINUTES, Math.ceil((time - started) / 60));
  // The last step has not ended.
  const values = Object.fromEntries(Object.entries(rates.values).map(([name, all]) => [name, all.slice(-1 - (60 * minutes) / step, -1)]));
  const rate = (name) => values[name].map((value) => value / step);
  const all = rate('requests'), failed = rate('failed');
  charts.requests.fill({main: all, fault: failed, step_s: step},
    (i) => [`${count(all[i])}/s`, failed[i] ? `${count(failed[i])}/s failed` : ''], (value) => `${count(value)}/s`);
  const p50 = values.ttft_p50_ms, p95 = values.ttft_p95_ms;
  charts.ttft.fill({main: p95, second: p50, step_s: step, area: false},
    (i) => [ms(p95[i]), p50[i] === null ? '' : `median ${ms(p50[i])}`], ms);
  const share = values.items.map((value, i) => (value ? values.items_cached[i] / value : null));
  charts.cache.fill({main: share, most: 1, step_s: step},
    (i) => [percent(share[i]), `of ${count(values.items[i] / step)} items/s`], percent);
  const tokens = rate('generated_tokens');
  charts.tokens.fill({main: tokens, step_s: step}, (i) => [`${count(tokens[i])}/s`, `${count(values.prompt_tokens[i] / step)}/s in prompts`], (value) => `${count(value)}/s`);
}

function drawRequests() {
  const {workers, live, tenants, time, model} = page.state;
  const isFiltered = requests.isFiltered();
  const views = isFiltered ? page.latest : [...live.listed, ...page.latest];
  const known = [...live.listed, ...page.latest];
  requests.offer('model', [model, ...known.map((view) => view.model)], 'All models');
  requests.offer('tenant', [...tenants.map((tenant) => tenant.name), ...known.map((view) => view.tenant)], 'All tenants');
  requests.offer('modality', ['text', ...known.flatMap((view) => view.items.map((item) => item.modality))], 'All media');
  requests.offer('worker', workers.listed.map((worker) => worker.name), 'All workers');
  const wanted = requests.filters();
  const matching = views.filter((view) => requests.wants(view, wanted));
  // Running ones, the longest first; then ended ones, the latest first.
  matching.sort((a, b) => Boolean(b.stage) - Boolean(a.stage) || (a.stage ? a.received_at - b.received_at : b.received_at - a.received_at));
  requests.drawRequests(matching, {live: isFiltered ? null : live.num, now: time, silent: new Set(workers.listed.filter((worker) => worker.isStuck).map((worker) => worker.name))});
}

const workerRows = find('#worker-rows');
head(workerRows, 'Worst first', 'State', 'First token p95, 1 min>', 'Run + wait>', 'KV in use>', 'Encoder cache>');

function drawWorkers() {
  const {workers} = page.state;
  const listed = worstFirst(workers.listed);
  const worst = listed.slice(0, MOST_WORKERS);
  list(workerRows, worst, (worker) => worker.name, (worker) => {
    const row = make('div', {class: 'row', title: 'Show its requests'}, make('span', {class: 'cut'}), make('span', {class: 'cut'}), ...Array.from({length: 4}, () => make('span', {class: 'num'})));
    row.addEventListener('click', () => showOnly({worker: worker.name}));
    return row;
  }, fillWorker);
  show(workerRows.head, worst.length > 0);
  show(find('#workers-empty'), !worst.length);
  write(find('#workers-empty'), 'No worker is connected. The gateway’s log says what it waits for.');
  const silent = listed.filter((worker) => worker.isStuck && worker.state === 'ready').length;
  const states = Object.entries({silent, ...workers.states, ready: (workers.states.ready ?? 0) - silent}).filter(([, number]) => number).map(([state, number]) => `${count(number)} ${state}`);
  const paused = listed.filter((worker) => worker.past.length && !worker.isStuck).length;
  write(find('#workers-note'), [states.length === 1 && workers.num > 1 ? `all ${states[0]}` : states.join(', '), paused ? `${count(paused)} paused before` : null, workers.num > worst.length ? `the worst ${worst.length} listed` : null].filter(Boolean).join('; '));
  drawMap(workers.num, listed);
}

const MEDIA_FROM = {shm: 'the store of this host', pull: 'a store of its own', inline: 'the gateway'};

function fillWorker(row, worker) {
  const [name, state, first, load, kv, encoder] = row.children;
  const {isStuck: isStopped, past} = worker;
  const role = worker.role === 'worker' ? null : worker.role;
  write(name, [shortName(worker.name), role].filter(Boolean).join(' · '));
  say(name, [worker.name, role, worker.transport && `media from ${MEDIA_FROM[worker.transport]}`].filter(Boolean).join(', '));
  const last = past.length ? ago(page.state.time - past.at(-1).at) : '';
  const text = isStopped && silence(worker) !== null ? `${worker.state === 'ready' ? 'silent' : worker.state} ${ms(silence(worker))}` : worker.state;
  write(state, worker.state === 'ready' && !isStopped && last ? `paused ${past.length}×, ${last}` : text);
  say(state, `${text}${last && `; paused ${times(past.length)} before, last ${last}`}`);
  mark(state, `cut ${isStopped ? 'bad' : worker.state === 'ready' && !last ? 'muted' : 'trouble'}`);
  write(first, ms(worker.first_token_p95_ms));
  mark(first, worker.first_token_p95_ms > LONG_MS ? 'num trouble' : 'num');
  say(first, `p95 of the last minute, from the hand-over to the first token; median ${ms(worker.first_token_p50_ms)}, of ${plural(worker.requests, 'request')}`);
  // While it is silent, what its engine has reported last is old.
  write(load, isStopped ? `${count(worker.in_flight)} sent` : worker.waiting ? `${count(worker.running)} + ${count(worker.waiting)}` : count(worker.running));
  say(load, `${plural(worker.running, 'request')} running, ${count(worker.waiting)} waiting, as its engine has reported last; ${count(worker.in_flight)} sent that have not ended`);
  mark(load, worker.waiting > Math.max(4, worker.running) ? 'num trouble' : 'num');
  write(kv, percent(worker.kv_usage));
  mark(kv, worker.kv_usage > 0.95 ? 'num trouble' : 'num');
  const cache = worker.encoder_cache;
  write(encoder, percent(cache?.size ? cache.used / cache.size : null));
  say(encoder, cache?.size ? `${count(cache.used)} of ${count(cache.size)} embeddings of media; a full cache is usual, the oldest make room` : 'no encoder cache');
}

/** A square for each listed worker; workers that need attention come first. */
function drawMap(num, listed) {
  const map = find('#worker-map');
  show(map, num >= MAP_FROM);
  show(find('#worker-map + p'), num >= MAP_FROM);
  if (num < MAP_FROM) return;
  write(find('#worker-map + p'), `${num > listed.length ? `The ${count(listed.length)} that need attention first` : 'All'}: the stronger, the busier; amber does not respond, red is lost`);
  const load = (worker) => worker.running + worker.waiting;
  const most = Math.max(1, ...listed.map(load));
  list(map, listed, (worker) => worker.name, () => make('i'), (square, worker) => {
    mark(square, worker.state === 'lost' ? 'lost' : worker.isStuck ? 'stalled' : load(worker) ? `load-${Math.ceil((4 * load(worker)) / most)}` : '');
    say(square, `${worker.name}: ${worker.state}, ${plural(load(worker), 'request')}`);
  });
  map.setAttribute('aria-label', `Load of ${plural(listed.length, 'worker')}, the worst first`);
}

const decisionRows = find('#decision-rows');
head(decisionRows, 'When', 'Worker', 'Why', 'Cost>', 'Next best>');

function drawDecisions() {
  const {decisions, time} = page.state;
  list(decisionRows, decisions.slice(0, MOST_DECISIONS), (decision) => `${decision.request} ${decision.time}`, (decision) => {
    const row = make('div', {class: 'row'}, make('span', {class: 'muted'}), make('span', {class: 'cut'}), make('span', {class: 'cut muted'}), make('span', {class: 'num'}), make('span', {class: 'num cut muted'}));
    row.addEventListener('click', () => openRequest(decision.request));
    return row;
  }, (row, decision) => {
    const [when, worker, why, cost, next] = row.children;
    write(when, ago(Math.max(0, time - decision.time)));
    write(worker, shortName(decision.worker));
    const cached = decision.cached_tokens ? `${decision.reason}, ${percent(decision.cached_tokens / Math.max(1, decision.num_tokens))} cached` : decision.reason;
    write(why, cached);
    say(row, `${decision.worker}: ${cached}`);
    write(cost, ms(requests.costOf(decision)));
    const best = decision.alternatives?.[0];
    write(next, best ? `${shortName(best.worker_id)} ${requests.costText(best.score, requests.costOf(decision))}` : 'no other');
  });
  show(decisionRows.head, decisions.length > 0);
  show(find('#decisions-empty'), !decisions.length);
}

const KINDS = [['encoded', 'as fetched', 'media-1'], ['decoded', 'decoded', 'media-2'], ['processed', 'tensors', 'media-3'], ['embedded', 'embeddings', 'media-4']];
const arenaBar = make('div', {class: 'bar'}, ...KINDS.map(([, , colour]) => make('i', {class: colour})));
const legend = make('div', {class: 'legend'}, ...KINDS.map(([, , colour]) => make('span', {}, make('i', {class: `swatch ${colour}`}), make('span'))));
const storeFacts = make('dl', {class: 'facts'});
find('#store').append(arenaBar, legend, storeFacts);

function drawMedia() {
  const {store, encoders} = page.state;
  show(find('#store'), Boolean(store?.arena));
  show(find('#store-empty'), !store?.arena);
  write(find('#store-empty'), store ? `The media store is ${store.state}${store.problem ? `: ${store.problem}` : '.'}` : 'The model takes no media.');
  if (store?.arena) drawStore(store, encoders);
  else write(find('#store-note'), '');
}

function drawStore({arena, preparers, kept, copied, memory_bytes: memory, state}, encoders) {
  const used = arena.size_bytes - arena.free_bytes;
  write(find('#store-note'), `${bytes(used)} of ${bytes(arena.size_bytes)} of shared memory${state === 'ready' ? '' : `; ${state}`}`);
  KINDS.forEach(([name, title], i) => {
    size(arenaBar.children[i], 'width', `${(100 * arena[`${name}_bytes`]) / arena.size_bytes}%`);
    write(legend.children[i].lastChild, `${title} ${bytes(arena[`${name}_bytes`])}`);
  });
  const lines = [
    ['In use', `${bytes(arena.pinned_bytes)} by requests; ${plural(arena.num_entries, 'entry', 'entries')}${arena.num_evictions ? `, ${count(arena.num_evictions)} evicted` : ''}`],
    ['Preparers', preparers && `${preparers.num_busy} of ${preparers.num_preparers} busy${preparers.num_queued ? `, ${plural(preparers.num_queued, 'item')} wait` : ''}; ${count(preparers.num_done)} items done${preparers.num_failed ? `, ${count(preparers.num_failed)} failed` : ''}${preparers.num_restarts ? `, ${plural(preparers.num_restarts, 'restart')}` : ''}`],
    ['Encoders', encoders.num ? `${count(encoders.states.ready ?? 0)} of ${count(encoders.num)} ready, ${count(encoders.running + encoders.waiting)} items` : 'none: workers encode'],
    ['Kept for clients', kept?.num_leases ? `${plural(kept.num_leases, 'item')}, ${bytes(kept.num_bytes)}` : null],
    ['From other hosts', Object.entries(copied ?? {}).filter(([, number]) => number).map(([mover, number]) => `${bytes(number)} by ${mover}`).join(', ')],
    ['Memory', Object.entries(memory ?? {}).map(([kind, number]) => `${kind} ${bytes(number)}`).join(', ')],
  ].filter(([, value]) => value);
  list(storeFacts, lines, ([name]) => name, ([name]) => make('div', {}, make('dt', {}, name), make('dd')), (node, [, value]) => write(node.lastChild, value));
}

const cacheRows = find('#cache-rows');
head(cacheRows, '', 'Found', '>', 'Of>');

function drawCaches() {
  const {items, embeddings, prompt_tokens: tokens, cached_tokens: cached} = page.state.caches;
  const sum = (counts) => Object.values(counts).reduce((all, number) => all + number, 0);
  const rows = [
    {name: 'Media items', title: `${count(items.hit)} in shared memory, ${count(items.shared)} made for another request at the same time, ${count(items.new)} prepared, ${count(items.sent)} left to the worker`, found: items.hit + items.shared, total: sum(items)},
    {name: 'Embeddings', title: `${count(embeddings.loaded)} loaded, ${count(embeddings.unneeded)} not needed, ${count(embeddings.encoded)} encoded and kept, ${count(embeddings.unkept)} not kept`, found: embeddings.loaded + embeddings.unneeded, total: sum(embeddings)},
    {name: 'Prompt tokens', title: 'in the KV cache of the worker', found: cached, total: tokens},
  ].filter((row) => row.total);
  list(cacheRows, rows, (row) => row.name, () =>
    make('div', {class: 'row'}, make('span', {class: 'cut'}), make('span', {class: 'meter'}), make('span', {class: 'num'}), make('span', {class: 'num muted'})), (row, cache) => {
    const [name, bar, share, total] = row.children;
    write(name, cache.name);
    say(row, cache.title);
    meter(bar, cache.found / cache.total, false);
    write(share, percent(cache.found / cache.total));
    write(total, count(cache.total));
  });
  show(cacheRows.head, rows.length > 0);
  show(find('#caches-empty'), !rows.length);
}

const senderRows = [['tenants', 'Tenant', 'Median TTFT>'], ['origins', 'Media from', 'Median fetch>']].map(([name, title, time]) => {
  const rows = find(`#${name}-rows`);
  head(rows, title, 'Requests>', 'New items>', time);
  return [name, rows];
});

function drawSenders() {
  for (const [name, rows] of senderRows) {
    const all = page.state[name].slice(0, MOST_SENDERS);
    list(rows, all, (each) => each.name ?? '', (each) => {
      const row = make('div', {class: 'row', title: 'Show its requests'}, make('span', {class: 'cut'}), make('span', {class: 'num'}), make('span', {class: 'num'}), make('span', {class: 'num'}));
      row.addEventListener('click', () => showOnly(name === 'tenants' ? {tenant: each.name} : {text: each.name}));
      return row;
    }, (row, each) => {
      const [title, number, fresh, time] = row.children;
      write(title, each.name ?? 'no key');
      say(title, each.name ?? 'no key');
      write(number, count(each.requests));
      write(fresh, each.items ? `${count(each.new)} of ${count(each.items)}` : '–');
      write(time, ms(each.p50_ms));
      mark(time, each.p50_ms > LONG_MS ? 'num trouble' : 'num');
    });
    show(rows, all.length > 0);
  }
  show(find('#senders-empty'), !page.state.tenants.length && !page.state.origins.length);
}

/** What is refused because there is too much of it; the rest are errors. */
const REFUSALS = new Set(['queue_full', 'queue_timeout', 'ttft_limit_exceeded', 'worker_busy', 'media_overloaded', 'arena_full', 'body_memory_exhausted']);

const problemRows = find('#problem-rows');
head(problemRows, 'Count', 'What', 'Last>');

function drawProblems() {
  const {errors, time} = page.state;
  list(problemRows, errors.slice(0, MOST_PROBLEMS), (error) => error.code, (error) => {
    const row = make('div', {class: 'row'}, make('span'), make('span', {class: 'cut'}), make('span', {class: 'num muted'}));
    row.addEventListener('click', () => openRequest(row.request));
    return row;
  }, (row, error) => {
    const [number, what, last] = row.children;
    row.request = error.last_request;
    write(number, count(error.num));
    write(what, error.code.replaceAll('_', ' '));
    mark(what, `cut ${REFUSALS.has(error.code) || error.status === 429 ? 'trouble' : error.status === 499 ? 'muted' : 'bad'}`);
    say(row, [error.status, error.reason || error.code].filter(Boolean).join(': '));
    write(last, error.last_at ? ago(Math.max(0, time - error.last_at)) : '');
  });
  show(problemRows.head, errors.length > 0);
  show(find('#problems-empty'), !errors.length);
}

// ---- one request

let detailTimer = null;
document.addEventListener('opened', follow);
find('#detail-close').addEventListener('click', close);

const whole = (id) => ask(`requests/${encodeURIComponent(id)}${page.served ? `?${new URLSearchParams({model: page.served})}` : ''}`);

/** Open a request whose id alone is known. */
async function openRequest(id) {
  const {status, body} = await whole(id);
  if (status === 200 && body) requests.openDetail(body);
}

/** Ask for the whole request, again and again while it runs. */
async function follow() {
  clearTimeout(detailTimer);
  const view = requests.shownRequest();
  if (!view) return;
  const {status, body} = await whole(view.id);
  if (requests.shownRequest() !== view) return;
  if (status !== 404 && (body?.stage || status !== 200)) detailTimer = setTimeout(follow, 1000 * DETAIL_S);
  if (status === 200 && body) requests.drawDetail(body);
}

function close() {
  clearTimeout(detailTimer);
  return requests.closeDetail();
}

// ---- what the user does

const form = find('#filters');
form.addEventListener('input', filterChanged);
form.addEventListener('submit', (event) => event.preventDefault());

/** Filter what is there at once, then ask for what passes. */
function filterChanged() {
  if (!page.state) return;
  drawRequests();
  clearTimeout(page.asking);
  page.asking = setTimeout(askForRequests, 200);
}

function pause() {
  page.isPaused = !page.isPaused;
  find('#pause').setAttribute('aria-pressed', page.isPaused);
  find('#pause').firstChild.textContent = page.isPaused ? 'Resume ' : 'Pause ';
  if (!page.isPaused && page.next) draw();
  showLink();
}
find('#pause').addEventListener('click', pause);

const THEMES = ['auto', 'light', 'dark'];
const dark = matchMedia('(prefers-color-scheme: dark)');

function useTheme(name) {
  document.documentElement.dataset.theme = name === 'auto' ? (dark.matches ? 'dark' : 'light') : name;
  write(find('#theme'), name[0].toUpperCase() + name.slice(1));
}
const theme = () => { try { return localStorage.getItem('medialane-theme') ?? 'auto'; } catch { return 'auto'; } };
dark.addEventListener('change', () => useTheme(theme()));
find('#theme').addEventListener('click', () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  try { localStorage.setItem('medialane-theme', next); } catch { /* private window: as the system */ }
  useTheme(next);
});
useTheme(theme());

find('#help-steps').append(...PARTS.flatMap((part) => [
  make('dt', {}, make('i', {class: `swatch step-${part.name}`}), ` ${part.title}`), make('dd', {}, part.text)]));
const help = find('#help');
find('#help-open').addEventListener('click', () => help.showModal());

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open || find('#content').hidden) return;
  const isTyping = event.target.matches('input[type="search"], input[type="password"], select');
  const act = {Escape: escape, ...(isTyping ? {} : {'/': () => form.elements.text.focus(), p: pause, '?': () => help.showModal(), ArrowDown: () => requests.step(1), ArrowUp: () => requests.step(-1)})}[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

function escape() {
  if (!close() && requests.isFiltered()) requests.clearFilters();
  document.activeElement?.blur();
}

poll();
