// OpenAI's client for JavaScript, for a model that hears, behind a key.
import { createReadStream, readFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";
import { maxTokens, printAll, question, settings, streamed } from "./recorded.mjs";
import { describe } from "./openai_errors.mjs";

const server = (apiKey) => new OpenAI({ baseURL: `${settings.base_url}/v1`, apiKey, maxRetries: 0 });
const client = server(settings.key);
const { model } = settings;
const clip = readFileSync(settings.clip);
const transcribe = (options = {}) =>
  client.audio.transcriptions.create({
    model, file: createReadStream(settings.clip), language: "en", temperature: 0, ...options,
  });

await printAll({
  transcription: () => transcribe(),
  "transcription of bytes": async () => transcribe({ file: await toFile(clip, "speech.wav", { type: "audio/wav" }) }),
  "transcription as text": () => transcribe({ response_format: "text" }),
  "transcription with segments": () => transcribe({ response_format: "verbose_json" }),
  "stream of a transcription": async () => streamed(await transcribe({ stream: true })),
  translation: () => client.audio.translations.create({ model, file: createReadStream(settings.clip), temperature: 0 }),
  "audio in a chat": () => {
    const heard = { type: "input_audio", input_audio: { data: clip.toString("base64"), format: "wav" } };
    const messages = [{ role: "user", content: [heard, { type: "text", text: question }] }];
    return client.chat.completions.create({ model, messages, max_tokens: maxTokens, temperature: 0 });
  },
  "broken audio": async () => transcribe({ file: await toFile(clip.subarray(0, 40), "speech.wav") }),
  "wrong key": () => server("guessed").models.list(),
}, describe);
