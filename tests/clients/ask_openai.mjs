// OpenAI's client for JavaScript, as its documentation uses it.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const client = new OpenAI({ maxRetries: 0 });

const names = [];
for await (const each of client.models.list()) names.push(each.id);
assert(names.includes(model));

const answer = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
assert.match(answer.choices[0].message.content, /Paris/);
console.log(answer.choices[0].message.content);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 16, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, answer.choices[0].message.content);
assert.equal(usage.completion_tokens, answer.usage.completion_tokens);

const helper = client.chat.completions.stream({ model, messages, max_tokens: 16, temperature: 0 });
assert.equal(await helper.finalContent(), text);

const left = await client.chat.completions.create({ model, messages, max_tokens: 512, stream: true });
for await (const _ of left) break; // aborts the request

const completion = await client.completions.create({ model, prompt: "The capital of France is", max_tokens: 4, temperature: 0 });
assert.match(completion.choices[0].text, /Paris/);

const Capital = z.object({ city: z.string().max(20), country: z.string().max(20) });
const parsed = await client.chat.completions.parse({
  model, messages, max_tokens: 60, temperature: 0, response_format: zodResponseFormat(Capital, "capital"),
});
assert(parsed.choices[0].message.parsed.city);
const cities = [];
const runner = client.chat.completions.runTools({
  model, messages: [{ role: "user", content: "What is the weather in Paris?" }], max_tokens: 60, temperature: 0,
  tools: [zodFunction({
    name: "weather", parameters: z.object({ city: z.string().max(20) }),
    function: ({ city }) => { cities.push(city); return `18 degrees in ${city}`; },
  })],
  tool_choice: { type: "function", function: { name: "weather" } },
  parallel_tool_calls: false,
});
assert.match((await runner.finalFunctionToolCall()).arguments, /city/);
assert(cities.length > 0);

const short = { model, max_output_tokens: 16, temperature: 0 };
const response = await client.responses.create({ input: messages, ...short });
assert.match(response.output_text, /Paris/);
let told = "";
for await (const event of await client.responses.create({ input: messages, stream: true, ...short })) {
  if (event.type === "response.output_text.delta") told += event.delta;
}
assert.equal(told, response.output_text);
const structured = await client.responses.parse({
  input: messages, ...short, max_output_tokens: 60, text: { format: zodTextFormat(Capital, "capital") },
});
assert(structured.output_parsed.city);
const next = await client.responses.create({ input: "And of Italy?", previous_response_id: response.id, ...short });
assert.equal(next.previous_response_id, response.id);

await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);
