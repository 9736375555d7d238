// The steps that a request passes, in order, and where a request's time went.

/** What operators see: `parts` are the steps that one place on the page shows together, since a request that is there
 * cannot be distinguished from outside; `steps` are the names in the API. */
export const PARTS = [
  {name: 'upload', title: 'Upload', steps: ['upload', 'intake', 'admission'], text: 'The body is read and checked, and the request admitted.'},
  {name: 'render', title: 'Render', steps: ['parse', 'render'], text: 'vLLM’s app checks the request, applies the chat template and makes the tokens of the prompt.'},
  {name: 'store', title: 'Store', steps: ['open', 'store'], text: 'Media wait for messages of the store or for a free preparer.'},
  {name: 'fetch', title: 'Fetch', steps: ['fetch'], text: 'Media are looked up in the cache, or fetched from their URL.'},
  {name: 'decode', title: 'Decode', steps: ['decode'], text: 'New media are decoded to pixels or samples, in a sandbox.'},
  {name: 'process', title: 'Process', steps: ['process', 'prepare'], text: 'The model’s processor makes tensors of them, once per host.'},
  {name: 'encode', title: 'Encode', steps: ['encode'], text: 'An encoder of its own makes embeddings, if there is one.'},
  {name: 'route', title: 'Route', steps: ['assemble', 'route'], text: 'The worker is chosen that will have the first token soonest.'},
  {name: 'hand_over', title: 'Hand over', steps: ['handover', 'transit'], text: 'The worker gets descriptors of shared memory, or the bytes; and the way of the first token back.'},
  {name: 'queue', title: 'Queue', steps: ['queue'], text: 'The request waits at the worker for its turn.'},
  {name: 'prefill', title: 'Prefill', steps: ['prefill', 'first_token'], text: 'The engine computes the prompt, up to the first token.'},
  {name: 'answer', title: 'Answer', steps: ['answer', 'response'], text: 'Tokens are generated and sent to the client.'},
];

export const PART = Object.fromEntries(PARTS.map((part) => [part.name, part]));
const PART_OF = Object.fromEntries(PARTS.flatMap((part) => part.steps.map((step) => [step, part.name])));

/** Who does what; `cells` are the counts at the top of the page. */
export const LANES = [
  {title: 'Gateway', cells: [{name: 'upload', parts: ['upload', 'render']}]},
  {title: 'Media store and preparers', cells: [{name: 'fetch', parts: ['store', 'fetch']}, {name: 'prepare', parts: ['decode', 'process']}]},
  {title: 'Encoders', cells: [{name: 'encode', parts: ['encode']}]},
  {title: 'Gateway', cells: [{name: 'route', parts: ['route', 'hand_over']}]},
  {title: 'Workers', cells: [{name: 'prefill', parts: ['queue', 'prefill']}, {name: 'answer', parts: ['answer']}]},
];
export const CELLS = LANES.flatMap((lane) => lane.cells);
const CELL_OF = Object.fromEntries(CELLS.flatMap((cell) => cell.parts.map((part) => [part, cell.name])));

export const partOf = (step) => PART_OF[step] ?? 'upload';
export const cellOf = (step) => CELL_OF[partOf(step)];

/** [{name, ms, isRunning}] of a request or an item, in order, without what took no time. */
export function spent(view) {
  const summed = {};
  const items = ['fetch', 'decode', 'process', 'prepare'].reduce((sum, step) => sum + (view.stages_ms?.[step] ?? 0), 0);
  for (const [step, value] of Object.entries(view.stages_ms ?? {})) {
    const part = PART_OF[step];
    if (part) summed[part] = (summed[part] ?? 0) + (step === 'store' ? Math.max(0, value - items) : value);
  }
  const current = view.stage ? partOf(view.stage) : null;
  if (current) summed[current] ??= 0;
  return PARTS.filter((part) => part.name in summed).map((part) => (
    {name: part.name, ms: summed[part.name], isRunning: part.name === current}));
}

/** How a step is called for a request that is in it: items of a request in preparation are decoded or processed. */
export function waitsFor(step) {
  if (step === 'prepare') return 'prepare';
  return PART[partOf(step)].title.toLowerCase();
}
