// When the server is asked: at the chosen interval, not while the tab is hidden, and on through
// failures, since a server that is restarted comes back under the same address.

/** Calls `ask` (async) again and again. Owned by the page; one call at a time. */
export class Poller {
  #ask;
  #intervalMs;
  #timer = null;
  #isAsking = false;

  constructor(ask, intervalMs) {
    this.#ask = ask;
    this.#intervalMs = intervalMs;
    document.addEventListener("visibilitychange", () => this.#plan(0));
    this.#plan(0);
  }

  /** Milliseconds from one answer to the next question; 0 to stop asking. */
  set intervalMs(value) {
    this.#intervalMs = value;
    this.#plan(0);
  }

  get intervalMs() {
    return this.#intervalMs;
  }

  get isPaused() {
    return this.#intervalMs === 0 || document.hidden;
  }

  #plan(waitMs) {
    clearTimeout(this.#timer);
    if (!this.isPaused && !this.#isAsking) this.#timer = setTimeout(() => this.#run(), waitMs);
  }

  async #run() {
    this.#isAsking = true;
    try {
      await this.#ask();
    } finally {
      this.#isAsking = false;
      this.#plan(this.#intervalMs);
    }
  }
}
