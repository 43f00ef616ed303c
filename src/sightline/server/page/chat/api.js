// Requests to the server, and what can go wrong with them.
import { KEY, store, stored } from "../local.js";

export class Failure extends Error {
  constructor(message, { status = 0, retryAfter = 0, title = "", param = "" } = {}) {
    super(message);
    Object.assign(this, { status, retryAfter, title, param });
  }
}
export const BROKEN = "The answer broke off";
const TITLES = { 400: "The request was refused", 401: "An API key is needed", 403: "Not allowed", 404: "Not found",
  413: "Too long", 422: "The request was refused", 429: "The server is busy", 503: "The server is not ready" };
let heldKey = ""; // where sessionStorage is off

export const hasKey = () => Boolean(stored("sessionStorage", KEY) ?? heldKey);

export function setKey(key) {
  heldKey = store("sessionStorage", KEY, key || null) ? "" : key;
}

async function failureOf(response) {
  let message = "", param = "";
  const body = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(body);
    message = errorMessage(error);
    param = error.param;
  } catch { message = body.trim().slice(0, 300); }
  const status = response.status;
  const title = TITLES[status] ?? (status >= 500 ? "The server failed" : "The request failed");
  const retryAfter = waitOf(response.headers.get("retry-after"));
  return new Failure(message || `HTTP ${status}`, { status, title, retryAfter, param });
}

function errorMessage(error) {
  return typeof error === "string" ? error : String(error.message);
}

function waitOf(header) {
  if (!header) return 0;
  const seconds = /^\s*\d+(\.\d+)?\s*$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.min(Math.max(Math.ceil(seconds), 0), 3600) : 0;
}

export async function request(path, options = {}) {
  const key = stored("sessionStorage", KEY) ?? heldKey;
  const headers = { ...options.headers, ...(key ? { authorization: "Bearer " + key } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const why = navigator.onLine === false ? "This device is offline." : "Is it running, and can this device reach it?";
    throw new Failure(`No answer from ${location.host}. ${why}`, { title: "The server cannot be reached" });
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

// Server-sent events, cut anywhere: inside of a line end, a field or a character.
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  let data = [];
  try {
    for (let ended = false; !ended;) {
      const { value, done } = await reader.read();
      ended = done;
      pending += done ? decoder.decode() : decoder.decode(value, { stream: true });
      let start = 0;
      const ends = /\r\n|\n|\r/g;
      for (let match; (match = ends.exec(pending));) {
        if (match[0] === "\r" && ends.lastIndex === pending.length && !ended) break; // its \n may be on the way
        const line = pending.slice(start, match.index);
        start = ends.lastIndex;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      pending = pending.slice(start);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chunks of a completion. Throws a Failure if the stream does not end as it should.
export async function* completion(body, signal, onHeaders) {
  const headers = { "content-type": "application/json", accept: "text/event-stream" };
  const response = await request("/v1/chat/completions", { method: "POST", headers, body, signal });
  onHeaders(response.headers);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(errorMessage(chunk.error), { title: BROKEN });
    yield chunk;
  }
  throw new Failure("The stream ended early, so this is not the whole answer.", { title: BROKEN });
}
