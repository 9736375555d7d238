// Anthropic's client for JavaScript.
import Anthropic from "@anthropic-ai/sdk";
import { longAnswer, maxTokens, parameters, printAll, question, settings, streamed, tooLong } from "./recorded.mjs";

const client = new Anthropic({ baseURL: settings.base_url, apiKey: settings.key || "none", maxRetries: 0 });
const { model } = settings;
const tools = [{ name: "describe", description: "Describe a picture", input_schema: parameters, strict: true }];
const image = (data) => ({ type: "image", source: { type: "base64", media_type: "image/jpeg", data } });
const photo = image(settings.photoBase64);

const asked = (...parts) => [{ role: "user", content: [...parts, { type: "text", text: question }] }];
const request = (parts, options) => ({
  model, messages: asked(...parts), max_tokens: maxTokens, temperature: 0, ...options,
});
const message = (parts = [], options = {}) => client.messages.create(request(parts, options));

// After these words the tiny model soon ends its call.
const called = { tools, messages: [{ role: "user", content: "A photograph" }], max_tokens: 150 };

const calls = {
  "message of text": () => message([], { system: "Be brief." }),
  "message with an image": () => message([photo]),
  "message with an image by URL": () => message([{ type: "image", source: { type: "url", url: settings.photo_url } }]),
  "stream of a message": async () => streamed(await message([photo], { stream: true })),
  "stream put together by the client": () => client.messages.stream(request([])).finalMessage(),
  "tools offered": () => message([photo], { tools }),
  "stream of a tool that is required": async () =>
    streamed(await message([], { tools, tool_choice: { type: "any" }, stream: true, max_tokens: 150 })),
  "number of tokens": () => client.messages.countTokens({ model, messages: asked(photo) }),
  "unknown model": () => message([], { model: "no-such-model" }),
  "prompt too long": () => message([{ type: "text", text: tooLong }]),
  "broken image": () => message([image(settings.brokenUrl.split(",")[1])]),
  "stream that the client leaves": async () => {
    for await (const _ of await message([photo], { max_tokens: longAnswer, stream: true, ignore_eos: true })) break;
    return "left";
  },
};

await printAll(calls, (error) => {
  const found = error.error?.error;
  return { status: error.status, type: found?.type, message: found?.message ?? error.message };
});
