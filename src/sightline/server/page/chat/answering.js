// Fills one answer from the server's stream. Knows messages and requests; `watcher` draws what is written.
import { BROKEN, completion, Failure } from "./api.js";
import {
  blank, dropRound, find, hasContent, identifier, messagesBefore, messagesOfRounds, nextRound, sourceOf,
} from "./conversation.js";
import { currentModel, forgetModels, loadModels, offersTools, refuseTools, requestBody } from "./settings.js";
import { ThoughtSplitter } from "./thought.js";
import { offeredTools, runCall } from "./tools.js";

const MOST_ROUNDS = 8; // of calls, until the reader asks for more
const MOST_CALLS = 128; // that a server takes back

export class Run {
  constructor(conversation, answer, watcher) {
    Object.assign(this, { conversation, answer, watcher });
    this.controller = new AbortController();
    this.started = performance.now(); // when the model was asked first
    this.asked = this.started; // and last
    this.wait = null; // for the first piece
    this.first = this.last = 0; // times of the first and the last piece since it was asked
    this.earlier = { tokens: 0, spent: 0, requests: 0, exact: true }; // requests that are over
    this.pieces = 0;
    this.usage = null;
  }
  stop() {
    this.controller.abort();
  }
  async write() { // from the start
    blank(this.answer);
    await this.fill([], {});
  }
  async goOn() { // where the answer ended
    const source = sourceOf(this.answer);
    Object.assign(this.answer, { state: "writing", finish: "", title: "", message: "", status: 0, retryAt: 0, calls: [] });
    if (!source) { // between two rounds
      dropRound(this.answer);
      return this.fill([], {});
    }
    const partial = { role: "assistant", content: source };
    return this.fill([partial], { continue_final_message: true, add_generation_prompt: false });
  }
  async fill(partial, fields) {
    const { answer } = this;
    this.splitter = new ThoughtSplitter(answer);
    this.watcher.begin(this);
    try {
      if (!currentModel()) await loadModels(this.controller.signal);
      const tools = offersTools() ? { tools: offeredTools } : {};
      await this.request(partial, { ...fields, ...tools });
      for (let round = 1; tools.tools && answer.finish === "tool_calls" && answer.calls.length; round++) {
        this.runCalls();
        if (round === MOST_ROUNDS) break;
        await this.request([], tools);
      }
      answer.state = "done";
    } catch (error) {
      this.end(error);
    }
    this.splitter.finish();
    answer.stats = this.statistics();
    this.conversation.updated = Date.now();
    this.watcher.end(this);
  }
  runCalls() {
    for (const call of this.answer.calls) runCall(call);
    nextRound(this.answer);
    this.splitter = new ThoughtSplitter(this.answer);
    this.watcher.write(this, false);
  }
  async request(partial, fields) {
    const question = find(this.conversation, this.answer.parent);
    const before = messagesBefore(this.conversation, question, Boolean(fields.tools));
    const asked = [...before, { role: "user", content: question.text }, ...messagesOfRounds(this.answer)];
    const { tokens, spent, requests, exact } = this.total();
    if (this.first) this.earlier = { tokens, spent, requests, exact };
    this.asked = performance.now();
    if (this.wait === null) this.started = this.asked;
    Object.assign(this, { first: 0, last: 0, pieces: 0, usage: null });
    this.answer.finish = "";
    await this.read(requestBody([...asked, ...partial], fields));
    this.splitter.finish();
  }
  async read(body) {
    const onHeaders = (headers) => { this.answer.sampling = headers.get("x-sightline-sampling") ?? ""; };
    for await (const chunk of completion(body, this.controller.signal, onHeaders)) {
      if (chunk.usage) this.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (choice?.finish_reason) this.answer.finish = choice.finish_reason;
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      const text = choice?.delta?.content ?? "";
      const calls = choice?.delta?.tool_calls ?? [];
      if (thought || text || calls.length) this.piece(thought, text, calls);
    }
  }
  piece(thought, text, calls) {
    this.last = performance.now();
    this.first ||= this.last;
    this.wait ??= this.first - this.started;
    this.pieces++;
    this.answer.thought += thought;
    const moved = text ? this.splitter.feed(text) : false;
    for (const piece of calls) this.callPiece(piece);
    this.watcher.write(this, moved);
  }
  callPiece({ index = 0, id, function: called }) {
    const { calls } = this.answer;
    if (!Number.isInteger(index) || index < 0 || index > calls.length || index >= MOST_CALLS) {
      throw new Failure("The server sent a call of a tool out of order.", { title: BROKEN });
    }
    calls[index] ??= { id: id || `call_${identifier()}`, name: "", arguments: "", result: null, failed: false };
    calls[index].name += called?.name ?? "";
    calls[index].arguments += called?.arguments ?? "";
  }
  end(error) {
    const { answer } = this;
    if (this.controller.signal.aborted) {
      answer.state = "stopped";
      return;
    }
    const notJson = error instanceof SyntaxError;
    const lost = notJson ? "The server sent what is not JSON." : "The connection to the server was lost.";
    const known = error instanceof Failure ? error : new Failure(lost, { title: BROKEN });
    if (!(error instanceof Failure)) console.warn(error);
    const { title, message, status, retryAfter, param } = known;
    const retryAt = retryAfter ? Date.now() + retryAfter * 1000 : 0;
    const state = hasContent(answer) ? "broken" : "failed";
    Object.assign(answer, { state, title, message, status, retryAt });
    if (status === 404) forgetModels();
    if (status === 400 && param === "tools") refuseTools(message);
  }
  total() { // of all requests
    const { tokens, spent, requests, exact } = this.earlier;
    return {
      tokens: tokens + (this.usage?.completion_tokens ?? this.pieces),
      spent: spent + this.last - this.first,
      requests: requests + 1,
      exact: exact && Boolean(this.usage),
    };
  }
  statistics() { // null before the first piece
    if (this.wait === null) return null;
    const { tokens, spent, requests, exact } = this.first ? this.total() : this.earlier;
    const timed = tokens > requests && spent > 20; // tokens that came in one burst say nothing about speed
    const rate = timed ? (tokens - requests) / spent * 1000 : 0;
    const prompt = this.usage?.prompt_tokens ?? null; // of the last request
    const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? null;
    return { exact, tokens, wait: this.wait, rate, prompt, cached };
  }
}
