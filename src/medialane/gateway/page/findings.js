// What stands out: the few sentences at the top of the page. Each compares one worker, origin or tenant with the others,
// over what the gateways measured in the last minute; one alone is compared with a fixed limit.

import {ago, count, ms, percent, plural} from './draw.js';

/** Fewer requests or items than this say nothing. */
const ENOUGH = 5, ENOUGH_ITEMS = 3;
const LONG_MS = 1000;
/** How much longer than elsewhere stands out. */
const MUCH = 3;
/** Items that are not cached, of a tenant's; what to prepare them takes, of what it takes for all. */
const MOSTLY_NEW = 0.8, MUCH_WORK = 0.1;
const MOST = 5;
const PAUSED_LATELY_S = 120, PAUSES_S = 900;

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor((values.length - 1) / 2)] ?? null;
const others = (all, one, value) => median(all.filter((each) => each !== one && value(each) !== null).map(value));

const LEVELS = ['red', 'amber', 'fine', 'grey'];
const CALM = {level: 'fine', subject: '', text: 'Nothing stands out: all workers answer, and nothing waits long'};

/** [{level, subject, text, filter}], the worst first: red and amber are faults, grey is what may explain one. Of
 * workers, `watchPauses` has noted more. */
export function findings(state) {
  const all = [...gateways(state), ...workers(state), ...store(state), ...origins(state), ...tenants(state), ...failures(state)];
  if (all.every((each) => each.level === 'grey')) all.push(CALM);
  return all.sort((a, b) => LEVELS.indexOf(a.level) - LEVELS.indexOf(b.level)).slice(0, MOST);
}

/** Note of each worker whether it does not respond (`isStuck`), and when it did not before (`past`): it may be well when
 * someone looks. `pauses` are all that this page has seen: name -> [{at, seconds}], seconds null while it lasts. */
export function watchPauses({workers: {listed}, time}, pauses) {
  for (const worker of listed) {
    const known = (pauses.get(worker.name) ?? []).filter((pause) => pause.seconds === null || time - pause.at < PAUSES_S);
    const last = known.at(-1);
    worker.isStuck = isStuck(worker, listed);
    if (worker.isStuck && last?.seconds !== null) known.push({at: time - (silence(worker) ?? 0) / 1000, seconds: null});
    else if (!worker.isStuck && last?.seconds === null) last.seconds = time - last.at;
    worker.past = known.filter((pause) => pause.seconds !== null);
    pauses.set(worker.name, known);
  }
}

const badness = (worker) => (worker.isStuck ? 1e6 : worker.past.length + (worker.first_token_p95_ms >= LONG_MS ? 0.5 : 0));

/** Workers that do not respond, that did not, that are slow; the others in the order of the server. */
export const worstFirst = (listed) => [...listed].sort((a, b) => badness(b) - badness(a));

function gateways({gateways: all, workers}) {
  const gone = all.filter((each) => !each.up);
  const problems = workers.num ? [...new Set(all.flatMap((each) => each.problems))] : [];
  return [
    ...(gone.length ? [{level: 'red', subject: `gateway ${gone.map((each) => each.index).join(', ')}`, text: 'does not answer: its requests are missing here'}] : []),
    ...problems.slice(0, 2).map((problem) => ({level: 'amber', subject: 'Health:', text: problem})),
  ];
}

/** Whether a worker does not respond: it is reported so, or a first token is long overdue and nothing that is seen of its
 * requests goes on (`silent_ms`, as the page has watched it). */
export function isStuck(worker, listed) {
  if (worker.state === 'stalled' || worker.state === 'lost') return true;
  return isOverdue(worker, listed) && (worker.silent_ms ?? 0) >= LONG_MS;
}

function isOverdue(worker, listed) {
  const elsewhere = others(listed, worker, (each) => each.first_token_p50_ms) ?? 0;
  return worker.oldest_ms !== null && worker.oldest_ms >= LONG_MS && worker.oldest_ms > MUCH * Math.max(elsewhere, worker.first_token_p50_ms ?? 0);
}

function workers({workers: {num, listed}, time}) {
  if (!num) return [{level: 'red', subject: 'No worker', text: 'is connected: requests are answered 503 until one is'}];
  const stuck = listed.filter((worker) => worker.isStuck);
  if (stuck.length > 3) {
    const names = stuck.slice(0, 3).map((each) => each.name).join(', ');
    return [{level: 'red', subject: plural(stuck.length, 'worker'), text: `do not answer: ${names} and others`}];
  }
  return listed.map((worker) => {
    if (!worker.isStuck) return slow(worker, listed, time);
    const before = worker.past.length ? `. It paused ${times(worker.past.length)} before, last ${ago(time - worker.past.at(-1).at)}` : '';
    return {level: 'red', subject: worker.name, filter: {worker: worker.name}, text: stuckText(worker) + before};
  }).filter(Boolean);
}

export const times = (number) => (number === 1 ? 'once' : `${number} times`);

/** How long it has not responded; null: unknown. */
export const silence = (worker) => (worker.state === 'ready' ? worker.silent_ms : worker.oldest_ms) ?? null;

function stuckText(worker) {
  const waiting = worker.in_flight ? `: ${plural(worker.in_flight, 'request')} wait${worker.in_flight === 1 ? 's' : ''} there` : '';
  if (worker.state === 'lost') return `is lost${waiting}`;
  return `${worker.state === 'stalled' ? 'is stalled' : 'does not respond'}${silence(worker) === null ? '' : `, for ${ms(silence(worker))}`}${waiting}`;
}

/** One pause is over, several are a cycle. */
function pausesText(past, time) {
  const typical = ms(1000 * median(past.map((pause) => pause.seconds))), last = ago(time - past.at(-1).at);
  return past.length === 1 ? `did not respond for ${typical}, ${last}` : `stops for ${typical} at a time: ${times(past.length)} so far, last ${last}`;
}

function slow(worker, listed, time) {
  const typical = others(listed, worker, (each) => each.first_token_p95_ms);
  const {first_token_p50_ms: usual, first_token_p95_ms: mine, past} = worker;
  const why = past.length ? pausesText(past, time) : '';
  const found = {level: 'amber', subject: worker.name, filter: {worker: worker.name}};
  if (mine !== null && worker.requests >= ENOUGH && mine >= LONG_MS && mine >= MUCH * (typical ?? 0)) {
    const elsewhere = typical === null ? '' : `, other workers ${ms(typical)}`;
    const rest = usual < mine / MUCH ? `, though half of its first tokens come within ${ms(usual)}` : '';
    return {...found, filter: {worker: worker.name, slow: true}, text: `is slow: p95 to the first token ${ms(mine)}${elsewhere}${rest}${why && `. It ${why}`}`};
  }
  if (past.length && time - past.at(-1).at < PAUSED_LATELY_S) return {...found, text: why};
  if (isOverdue(worker, listed)) return {...found, text: `is slow: a request has waited ${ms(worker.oldest_ms)} for its first token there`};
  return null;
}

const areBusy = (preparers) => preparers.num_queued > 0 && preparers.queue_s > 0.5;

function store({store: found}) {
  if (!found) return [];
  if (found.state !== 'ready') return [{level: 'red', subject: 'media store', text: `is ${found.state}: requests with media wait${found.problem ? ` (${found.problem})` : ''}`}];
  const {preparers, arena} = found;
  const {num_preparers: num, num_alive: alive, num_queued: queued} = preparers;
  return [
    areBusy(preparers) && {level: 'amber', subject: 'preparers', text: `are all busy: ${plural(queued, 'media item')} wait${queued === 1 ? 's' : ''}, for about ${ms(1000 * preparers.queue_s)}`},
    alive < num / 2 && {level: 'amber', subject: 'preparers', text: `are missing: ${alive} of ${num} run`},
    arena.pinned_bytes > 0.85 * arena.size_bytes && {level: 'amber', subject: 'shared memory', text: `is full of media in use (${percent(arena.pinned_bytes / arena.size_bytes)}): new ones wait for space`},
  ].filter(Boolean);
}

function origins({origins: all}) {
  return all.filter((origin) => {
    const longest = Math.max(origin.p50_ms ?? 0, origin.items < ENOUGH_ITEMS ? origin.oldest_ms ?? 0 : 0);
    return longest >= LONG_MS / 2 && longest > MUCH * (others(all, origin, (each) => each.p50_ms) ?? 0);
  }).map((origin) => {
    const elsewhere = others(all, origin, (each) => each.p50_ms);
    const live = origin.live ? `; ${plural(origin.live, 'request')} with media from there in flight` : '';
    return {level: 'amber', subject: origin.name, filter: {text: origin.name}, text: `answers slowly: to fetch an item takes ${ms(origin.p50_ms ?? origin.oldest_ms)}${elsewhere === null ? '' : `, elsewhere ${ms(elsewhere)}`}${live}`};
  });
}

/** New media are a fault only if others wait for them. */
function tenants({tenants: all, store: found}) {
  const work = all.reduce((sum, tenant) => sum + tenant.prepare_ms, 0);
  const level = found?.preparers && areBusy(found.preparers) ? 'amber' : 'grey';
  if (all.length < 2) return [];
  return all.filter((tenant) => tenant.items >= ENOUGH && tenant.new >= MOSTLY_NEW * tenant.items && tenant.prepare_ms > MUCH_WORK * work)
    .sort((a, b) => b.prepare_ms - a.prepare_ms)
    .map((tenant) => ({level, subject: tenant.name, filter: {tenant: tenant.name},
      text: `sends new media: ${count(tenant.new)} of its ${count(tenant.items)} items were not cached, ${percent(tenant.prepare_ms / work)} of the time of all preparations`}));
}

function failures({rates: {values}, errors}) {
  const sum = (name) => values[name].slice(-12).reduce((all, value) => all + value, 0);
  const failed = sum('failed'), requests = sum('requests');
  const worst = errors.find((error) => error.code !== 'client_disconnected');
  if (failed < 3 || failed < 0.03 * requests || !worst) return [];
  return [{level: failed > 0.1 * requests ? 'red' : 'amber', subject: `${percent(failed / requests)} of requests`, filter: {failed: true},
    text: `failed in the last minute, most with ${worst.code.replaceAll('_', ' ')}${worst.reason ? ` (${worst.reason})` : ''}`}];
}
