// The example tools. They run in this browser, know nothing of the page, and ask no server.
import { calculated } from "./calculator.js";

const text = (description) => ({ type: "string", description });
const TOOLS = {
  calculate: {
    description: "Works out an arithmetic expression: + - * / % ^, brackets, sqrt, sin, cos, tan, ln, log, exp, pi, e.",
    properties: { expression: text("For example (2 + 3) * 4 ^ 2") },
    required: ["expression"],
    run: ({ expression }) => calculated(expression),
  },
  current_time: {
    description: "Tells the date and the time.",
    properties: { time_zone: text("For example Europe/Rome; the user's own if left out") },
    required: [],
    run: ({ time_zone }) => currentTime(time_zone),
  },
};

function currentTime(timeZone) {
  const format = new Intl.DateTimeFormat("en-GB", {
    timeZone, weekday: "long", day: "numeric", month: "long", year: "numeric", hour: "2-digit", minute: "2-digit",
    second: "2-digit", timeZoneName: "longOffset",
  });
  return `${format.format(new Date())}, ${format.resolvedOptions().timeZone}`;
}

// As a request names them.
export const offeredTools = Object.entries(TOOLS).map(([name, { description, properties, required }]) => {
  const parameters = { type: "object", properties, required, additionalProperties: false };
  return { type: "function", function: { name, description, parameters } };
});

function runNamed(name, text) {
  if (!Object.hasOwn(TOOLS, name)) throw new Error(`there is no tool ${name}`);
  const { properties, required, run } = TOOLS[name];
  const values = JSON.parse(text || "{}");
  if (values === null || typeof values !== "object" || Array.isArray(values)) throw new Error("the arguments are no object");
  for (const [key, value] of Object.entries(values)) {
    if (!Object.hasOwn(properties, key)) throw new Error(`there is no argument ${key}`);
    if (typeof value !== "string") throw new Error(`${key} is not a text`);
  }
  const missing = required.find((key) => !Object.hasOwn(values, key));
  if (missing) throw new Error(`${missing} is missing`);
  return run(values);
}

// Sets the result of a call. An error is a result too, which the model is told.
export function runCall(call) {
  try {
    Object.assign(call, { result: runNamed(call.name, call.arguments), failed: false });
  } catch (error) {
    Object.assign(call, { result: `Error: ${error.message}`, failed: true });
  }
}
