// Runs a client's calls against one server, and prints what the client got from each as JSON, as ../programs/recorded.py
// does, with the same settings.
import { readFileSync } from "node:fs";

const given = JSON.parse(process.argv[2]);
const photo = readFileSync(given.photo);
const pdf = readFileSync(given.pdf);

export const settings = {
  ...given,
  pdfDataUrl: `data:application/pdf;base64,${pdf.toString("base64")}`,
  photoBase64: photo.toString("base64"),
  dataUrl: `data:image/jpeg;base64,${photo.toString("base64")}`,
  brokenUrl: `data:image/jpeg;base64,${photo.subarray(0, 5000).toString("base64")}`,
};
export const maxTokens = 10;
// Of structured outputs: see recorded.py.
export const frequencyPenalty = 2;
export const longAnswer = 7000;
export const question = "What is in the picture?";
export const tooLong = "word ".repeat(9000);
export const parameters = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "green", "blue"] } },
  required: ["colour"],
  additionalProperties: false,
};

/** The part of a document, or, for a server that takes none, those of its pages, by `text` and `picture` of a data: URL. */
export function document(part, text, picture, name = "") {
  if (given.takes_documents) return [part];
  return given.pages.flatMap(([words, file], number) => [
    text(name && !number ? `${name}\n${words}` : words), picture(`data:image/png;base64,${readFileSync(file).toString("base64")}`),
  ]);
}

/** The events of a stream, which are compared apart from how its text was cut. */
export async function streamed(events) {
  const found = [];
  for await (const event of events) found.push(event);
  return { stream: found };
}

/** Make the calls in their order, and print what each gave. `describe` makes an error comparable. */
export async function printAll(calls, describe) {
  const outcomes = {};
  for (const [name, call] of Object.entries(calls)) {
    try {
      outcomes[name] = { value: await call() };
    } catch (error) {
      outcomes[name] = { error: { class: error.constructor.name, ...describe(error) } };
    }
  }
  process.stdout.write(JSON.stringify(outcomes));
}
