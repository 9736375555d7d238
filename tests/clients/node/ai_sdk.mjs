// Vercel's AI SDK, with its provider for servers that speak OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { z } from "zod";
import { document, frequencyPenalty, longAnswer, maxTokens, parameters, printAll, question, settings, tooLong } from "./recorded.mjs";

const provider = createOpenAICompatible({
  name: "medialane", baseURL: `${settings.base_url}/v1`, apiKey: settings.key || "none",
  includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(settings.model);
const tools = { describe: tool({ description: "Describe a picture", inputSchema: jsonSchema(parameters), strict: true }) };
const written = { maxOutputTokens: 150, frequencyPenalty };
const photo = { type: "image", image: settings.dataUrl };
const file = { type: "file", mediaType: "application/pdf", data: settings.pdfDataUrl, filename: "report.pdf" };
const pages = document(file, (text) => ({ type: "text", text }), (image) => ({ type: "image", image }), "report.pdf");
const schema = z.object({ kind: z.enum(["photo", "drawing"]), sharp: z.boolean() });

const request = (parts, options) => ({
  model, messages: [{ role: "user", content: [...parts, { type: "text", text: question }] }],
  maxOutputTokens: maxTokens, temperature: 0, maxRetries: 0, ...options,
});
const result = ({ text, finishReason, usage, toolCalls }) => ({
  text, finishReason, usage, tools: toolCalls.map(({ toolName, input, invalid }) => ({ toolName, input, invalid })),
});
const generated = async (parts = [], options = {}) => result(await generateText(request(parts, options)));

/** The kinds of a stream's parts in their order, its whole text, and its end. */
async function streamedText(parts = [], options = {}) {
  const failures = [];
  const stream = streamText(request(parts, { onError: ({ error }) => failures.push(error), ...options }));
  const kinds = [];
  for await (const { type } of stream.fullStream) if (kinds.at(-1) !== type) kinds.push(type);
  if (failures.length) throw failures[0];
  const [text, finishReason, usage] = await Promise.all([stream.text, stream.finishReason, stream.usage]);
  return { kinds, text, finishReason, usage };
}

const calls = {
  "text": () => generated(),
  "text about an image": () => generated([photo]),
  "text about a document": () => generated(pages),
  "stream": () => streamedText([photo]),
  "tools offered": () => generated([photo], { tools }),
  "tool forced": () => generated([], { tools, toolChoice: { type: "tool", toolName: "describe" }, ...written }),
  "tool forced, in a stream": () =>
    streamedText([], { tools, toolChoice: { type: "tool", toolName: "describe" }, ...written }),
  "object": async () => (await generateObject(request([photo], { schema, ...written }))).object,
  "unknown model": () => generated([], { model: provider("no-such-model") }),
  "prompt too long": () => generated([{ type: "text", text: tooLong }]),
  "stream of a prompt too long": () => streamedText([{ type: "text", text: tooLong }]),
  "broken image": () => generated([{ type: "image", image: settings.brokenUrl }]),
  "request that the client aborts": () =>
    generated([], { maxOutputTokens: longAnswer, abortSignal: AbortSignal.timeout(1000) }),
};

await printAll(calls, (error) => ({
  status: error.statusCode, retryable: error.isRetryable, message: error.message, code: error.data?.error?.code,
}));
