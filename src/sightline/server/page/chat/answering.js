// Fills one answer from the server's stream. Knows messages and requests; `watcher` draws what is written.
import { BROKEN, completion, Failure } from "./api.js";
import { blank, find, messagesBefore, sourceOf } from "./conversation.js";
import { currentModel, forgetModels, loadModels, requestBody } from "./settings.js";
import { ThoughtSplitter } from "./thought.js";

export class Run {
  constructor(conversation, answer, watcher) {
    Object.assign(this, { conversation, answer, watcher });
    this.controller = new AbortController();
    this.started = performance.now();
    this.first = this.last = 0; // times of the first and the last piece
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
    const partial = { role: "assistant", content: sourceOf(this.answer) };
    Object.assign(this.answer, { state: "writing", finish: "", title: "", message: "", status: 0, retryAt: 0 });
    await this.fill([partial], { continue_final_message: true, add_generation_prompt: false });
  }
  async fill(partial, fields) {
    this.splitter = new ThoughtSplitter(this.answer);
    this.watcher.begin(this);
    try {
      if (!currentModel()) await loadModels(this.controller.signal);
      const question = find(this.conversation, this.answer.parent);
      const asked = [...messagesBefore(this.conversation, question), { role: "user", content: question.text }];
      this.started = performance.now();
      await this.read(requestBody([...asked, ...partial], fields));
      this.answer.state = "done";
    } catch (error) {
      this.end(error);
    }
    this.splitter.finish();
    this.answer.stats = this.statistics();
    this.conversation.updated = Date.now();
    this.watcher.end(this);
  }
  async read(body) {
    const onHeaders = (headers) => { this.answer.sampling = headers.get("x-sightline-sampling") ?? ""; };
    for await (const chunk of completion(body, this.controller.signal, onHeaders)) {
      if (chunk.usage) this.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (choice?.finish_reason) this.answer.finish = choice.finish_reason;
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      const text = choice?.delta?.content ?? "";
      if (thought || text) this.piece(thought, text);
    }
  }
  piece(thought, text) {
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces++;
    this.answer.thought += thought;
    const moved = text ? this.splitter.feed(text) : false;
    this.watcher.write(this, moved);
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
    const { title, message, status, retryAfter } = known;
    const retryAt = retryAfter ? Date.now() + retryAfter * 1000 : 0;
    const state = answer.text || answer.thought ? "broken" : "failed";
    Object.assign(answer, { state, title, message, status, retryAt });
    if (status === 404) forgetModels();
  }
  statistics() { // null before the first piece
    if (!this.first) return null;
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const spent = this.last - this.first;
    const timed = tokens > 1 && spent > 20; // tokens that came in one burst say nothing about speed
    const rate = timed ? (tokens - 1) / spent * 1000 : 0;
    const prompt = this.usage?.prompt_tokens ?? null;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? null;
    return { exact: Boolean(this.usage), tokens, wait: this.first - this.started, rate, prompt, cached };
  }
}
