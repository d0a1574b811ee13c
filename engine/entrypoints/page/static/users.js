// The users whose state is kept, by tier: asked for less often than the numbers, and by hand.

import { bar, byId, el, scrollable, table } from "./dom.js";
import { ago, count } from "./format.js";
import { get } from "./server.js";

const LIMIT = 100;
const PAUSE_MS = 5000;

const COLUMNS = [
  { title: "user" },
  { title: "namespace" },
  { title: "version" },
  { title: "device and host tokens" },
  { title: "device", numeric: true },
  { title: "host", numeric: true },
  { title: "pages", numeric: true },
  { title: "chunks", numeric: true },
  { title: "last use", numeric: true },
];

/** The panel. `refresh` is called with every poll and asks when it is time to. */
export class UsersPanel {
  #body = byId("users").querySelector(".body");
  #tier = byId("users-tier");
  #askedAt = -Infinity;
  #isOff = false;

  constructor() {
    this.#tier.addEventListener("change", () => this.ask());
    byId("users-refresh").addEventListener("click", () => this.ask());
  }

  async refresh() {
    // A server without the route, or that refuses it, is not asked again unless by hand.
    if (!this.#isOff && performance.now() - this.#askedAt >= PAUSE_MS) await this.ask();
  }

  async ask() {
    this.#askedAt = performance.now();
    const tier = this.#tier.value;
    try {
      const answer = await get(`v1/users?limit=${LIMIT}${tier ? `&tier=${tier}` : ""}`);
      this.#isOff = false;
      this.#draw(answer);
    } catch (failure) {
      this.#isOff = [401, 403, 404].includes(failure.status);
      this.#body.replaceChildren(el("p", { class: "note" }, whyNot(failure)));
    }
  }

  #draw({ states: users, total }) {
    if (users.length === 0) {
      this.#body.replaceChildren(el("p", { class: "note" }, "No user has state in this tier."));
      return;
    }
    const lengths = users.flatMap((user) => [user.device_tokens, user.host_tokens]);
    const longest = Math.max(1, ...lengths);
    const rows = users.map((user) => [
      user.user_id,
      user.namespace,
      user.weights_version,
      residencyBars(user, longest),
      count(user.device_tokens),
      count(user.host_tokens),
      count(user.pages),
      count(user.chunks),
      ago(user.idle_s),
    ]);
    const scrolled = this.#body.querySelector(".scroll");
    const list = scrollable("Users", table("Users by residency", COLUMNS, rows));
    const { scrollTop = 0, scrollLeft = 0 } = scrolled ?? {};
    const hadFocus = scrolled !== null && scrolled === document.activeElement;
    this.#body.replaceChildren(
      list, el("p", { class: "note" }, `${count(users.length)} of ${count(total)} states, the last used first`));
    list.scrollTo(scrollLeft, scrollTop);
    if (hadFocus) list.focus({ preventScroll: true });
  }
}

/** Two bars, one above the other: the same prefix may lie in both tiers. */
function residencyBars(user, longest) {
  return el("div", { class: "residency" }, ["device", "host"].map((tier) => {
    const tokens = user[`${tier}_tokens`];
    return bar(`${tier}: ${count(tokens)} tokens`, [{ kind: tier, share: tokens / longest }]);
  }));
}

function whyNot({ status, body }) {
  if (status === 404) return "This server has no list of users (GET /v1/users answers 404).";
  if (status === 401) return "The list of users needs an API key (GET /v1/users answers 401).";
  if (status === 403) return "This API key may not list users (GET /v1/users answers 403).";
  return `The list of users could not be read: ${body.error}`;
}
