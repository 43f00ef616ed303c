// OpenAI's client for JavaScript, as its documentation uses it.
import assert from "node:assert/strict";
import OpenAI from "openai";

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

await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError);
