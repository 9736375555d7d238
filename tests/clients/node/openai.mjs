// OpenAI's client for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { frequencyPenalty, longAnswer, maxTokens, parameters, printAll, question, settings, streamed, tooLong } from "./recorded.mjs";
import { describe } from "./openai_errors.mjs";

const client = new OpenAI({ baseURL: `${settings.base_url}/v1`, apiKey: settings.key || "none", maxRetries: 0 });
const { model } = settings;
const tool = { name: "describe", description: "Describe a picture", parameters, strict: true };
const tools = [{ type: "function", function: tool }];
const forced = { type: "function", function: { name: "describe" } };
const Picture = z.object({ kind: z.enum(["photo", "drawing"]), sharp: z.boolean() });
const written = { max_tokens: 150, frequency_penalty: frequencyPenalty };
const unending = { max_tokens: longAnswer, n: 4, temperature: 1, ignore_eos: true };
const photo = { type: "image_url", image_url: { url: settings.dataUrl } };

const asked = (...parts) => [{ role: "user", content: [...parts, { type: "text", text: question }] }];
const request = (parts, options) => ({
  model, messages: asked(...parts), max_tokens: maxTokens, temperature: 0, ...options,
});
const chat = (parts = [], options = {}) => client.chat.completions.create(request(parts, options));
const streamedChat = async (parts = [], options = {}) => streamed(await chat(parts, { ...options, stream: true }));
const respond = (options = {}) => {
  const content = [
    { type: "input_text", text: question },
    { type: "input_image", image_url: settings.dataUrl, detail: "auto" },
  ];
  const input = [{ role: "user", content }];
  return client.responses.create({ model, input, max_output_tokens: maxTokens, temperature: 0, ...options });
};

const calls = {
  "model list": async () => (await client.models.list()).data.map((found) => found.id),
  "chat of text": () => chat(),
  "chat with an image": () => chat([photo]),
  "chat with an image by URL": () => chat([{ type: "image_url", image_url: { url: settings.photo_url } }]),
  "two answers with logprobs": () => chat([], { n: 2, temperature: 0.8, seed: 7, logprobs: true, top_logprobs: 2 }),
  "stream with usage": () => streamedChat([photo], { stream_options: { include_usage: true } }),
  "stream put together by the client": async () => {
    const runner = client.chat.completions.stream(request([], { stream_options: { include_usage: true } }));
    return [await runner.finalContent(), await runner.totalUsage()];
  },
  "tools offered": () => chat([photo], { tools, tool_choice: "auto" }),
  "tool forced": () => chat([photo], { tools, tool_choice: forced, ...written }),
  "stream of a forced tool": () => streamedChat([], { tools, tool_choice: forced, ...written }),
  "JSON schema parsed by the client": async () => {
    const format = { response_format: zodResponseFormat(Picture, "picture"), ...written };
    return (await client.chat.completions.parse(request([photo], format))).choices[0].message.parsed;
  },
  completion: () => client.completions.create({ model, prompt: "A photograph", max_tokens: maxTokens, temperature: 0 }),
  response: () => respond(),
  "stream of a response": async () => streamed(await respond({ stream: true })),
  "response with a tool": () =>
    respond({ tools: [{ type: "function", ...tool, strict: false }], tool_choice: "required", max_output_tokens: 150 }),
  "unknown model": () => chat([], { model: "no-such-model" }),
  "temperature below zero": () => chat([], { temperature: -1 }),
  "prompt too long": () => chat([{ type: "text", text: tooLong }]),
  "stream of a prompt too long": () => streamedChat([{ type: "text", text: tooLong }]),
  "broken image": () => chat([{ type: "image_url", image_url: { url: settings.brokenUrl } }]),
  "image that is not there": () => chat([{ type: "image_url", image_url: { url: settings.missing_url } }]),
  "timeout of the client": () =>
    client.chat.completions.create(request([], unending), { timeout: 1000 }),
  "stream that the client leaves": async () => {
    for await (const _ of await chat([photo], { ...unending, stream: true })) break;
    return "left";
  },
  "stream that the client aborts": async () => {
    const stream = await chat([photo], { ...unending, stream: true });
    for await (const _ of stream) stream.controller.abort();
    return "aborted";
  },
};

await printAll(calls, describe);
