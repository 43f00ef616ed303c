// Vercel's AI SDK: OpenAI-compatible chat, OpenAI's responses, and Anthropic's messages.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.BASE_URL;
const named = process.env.MODEL;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  chat: createOpenAICompatible({ name: "sightline", baseURL, supportsStructuredOutputs: true, includeUsage: true })(named),
  "openai chat": openai.chat(named),
  responses: openai.responses(named),
  messages: createAnthropic({ baseURL, apiKey: "none" })(named),
};
const prompt = "What is the capital of France?";
const capital = z.object({ city: z.string().max(20), country: z.string().max(20) });

for (const [name, model] of Object.entries(models)) {
  const greedy = { model, temperature: 0, maxRetries: 0 };
  const { text } = await generateText({ ...greedy, prompt, maxOutputTokens: 16 });
  assert.match(text, /Paris/, name);
  const stream = streamText({ ...greedy, prompt, maxOutputTokens: 16 });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  assert.equal(streamed, text, name);
  assert((await stream.usage).outputTokens > 0);

  if (name !== "messages") {
    const { output } = await generateText({
      ...greedy, prompt, maxOutputTokens: 80, output: Output.object({ schema: capital }),
    });
    console.log(name, output);
  }

  const cities = [];
  const weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string().max(20) }),
    execute: async ({ city }) => { cities.push(city); return `18 degrees in ${city}`; },
  });
  const result = await generateText({
    ...greedy,
    prompt: "What is the weather in Paris?",
    maxOutputTokens: 60,
    tools: { weather },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
  });
  assert(cities.length > 0, name);
  assert.equal(result.steps.length, 2, name);
  console.log(name, cities, JSON.stringify(result.text));
}
