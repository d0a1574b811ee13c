// Calls to the server: JSON in and out, a time limit, and the API key where one is asked for.

const KEY = "mtserve.api-key";
const LIMIT_MS = 10000;

/**
 * A call that brought no good answer. `status` is 0 when there was no answer at all; `body` is the
 * server's own word: {error, code, limit, value, request_id}.
 */
export class Failure extends Error {
  constructor(status, body) {
    super(body.error);
    this.status = status;
    this.body = body;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** The JSON at a path (relative, so that the page also works behind a path prefix). */
export function get(path) {
  return call(path, {}, LIMIT_MS);
}

/** The JSON answer to a JSON body. Ranking may take long when the queue is: no time limit. */
export function post(path, body) {
  return call(path, { method: "POST", body: JSON.stringify(body) }, null);
}

async function call(path, options, limitMs) {
  const headers = { accept: "application/json" };
  if (options.body !== undefined) headers["content-type"] = "application/json";
  if (hasKey()) headers.authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  const signal = limitMs === null ? null : AbortSignal.timeout(limitMs);
  let answer;
  let text;
  try {
    answer = await fetch(path, { ...options, headers, signal, cache: "no-store" });
    text = await answer.text();
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new Failure(0, {
      error: late ? `no answer within ${limitMs / 1000} s` : "the server cannot be reached",
      code: late ? "timeout" : "unreachable",
    });
  }
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Failure(answer.status, {
      error: `HTTP ${answer.status} without JSON: is a proxy between?`,
      code: "not_json",
    });
  }
  if (!answer.ok) {
    throw new Failure(answer.status, {
      ...body,
      error: typeof body.error === "string" ? body.error : `HTTP ${answer.status}`,
    });
  }
  return body;
}
