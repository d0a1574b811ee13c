// The page: asks the server, keeps what it says, and hands it to the panels.

import { AnswerPanel } from "./answer.js";
import { byId, say } from "./dom.js";
import { ago, seconds } from "./format.js";
import { Poller } from "./poller.js";
import { RequestForm } from "./request_form.js";
import { drawLatency, drawLoad, drawOutcomes, drawVersions } from "./request_panels.js";
import { Samples } from "./samples.js";
import { get, hasKey, setKey } from "./server.js";
import { drawCopies, drawHits, drawTiers } from "./state_panels.js";
import { UsersPanel } from "./users.js";

const PANELS = {
  tiers: drawTiers, hits: drawHits, load: drawLoad, latency: drawLatency, copies: drawCopies,
  outcomes: drawOutcomes,
};

const samples = new Samples();
const users = new UsersPanel();
const answers = new AnswerPanel((item) => form.append(item));
const form = new RequestForm(byId("request"), {
  onAnswer: (answer, sent) => answers.show(answer, sent, form.scoreNames),
  onFailure: (error) => {
    if (error.status === 401) askForKey();
    answers.showFailure(error);
  },
});
const poller = new Poller(ask, Number(byId("interval").value));

let status = null; // the last answer of /v1/status
let model = null; // metadata of the loaded model
let activeWeights = null; // the version that metadata is of
let weights = []; // the loaded versions, if there are several
let answeredMs = null; // when the numbers below were true, on the clock of performance.now()
let answeredAt = null; // the same as a Date
let failure = null; // why the last question failed
let restartedAt = null; // Date of the restart that was last noticed

const chosenWindowS = () => Number(byId("window").value);

/** One round: the metrics, then what tells what they mean. */
async function ask() {
  try {
    const known = await get("v1/metrics.json");
    answeredMs = performance.now();
    answeredAt = new Date();
    if (samples.add(known, answeredMs / 1000)) {
      restartedAt = new Date();
      model = null;
    }
    status = await get("v1/status");
    failure = null;
    if (model === null || activeWeights !== status.active_weights) {
      model = await get(`v2/models/${encodeURIComponent(status.model)}`);
      activeWeights = status.active_weights;
    }
    const isAlone = status.weights_versions.length < 2;
    weights = isAlone ? [] : (await get("v1/weights:list")).versions;
    byId("key-form").hidden = true;
    showModel();
    draw();
    await users.refresh();
  } catch (error) {
    if (error.status === undefined) throw error;
    failure = error;
    if (error.status === 401) askForKey();
  }
  showHealth();
}

function draw() {
  const windowS = chosenWindowS();
  const span = samples.recent(windowS);
  const view = {
    samples, windowS, span, model, weights,
    recently: `last ${seconds(Math.max(1, Math.round(span.lengthS)))}`,
    range: { endS: span.last.timeS, lengthS: samples.chartS(windowS) },
  };
  for (const [id, drawPanel] of Object.entries(PANELS)) {
    drawPanel(byId(id).querySelector(".body"), view);
  }
  drawVersions(byId("versions"), view);
}

function showModel() {
  const { parameters } = model;
  byId("model").textContent =
    `${model.name} \u00b7 ${status.active_weights} \u00b7 ${parameters.dtype} \u00b7 ` +
    `${parameters.backend} (${parameters.exactness}) \u00b7 reuse ${parameters.reuse}`;
  byId("model").title = parameters.reuse_reason;
  byId("random").hidden = !parameters.is_random;
  byId("phase").textContent = status.phase;
  byId("phase").dataset.phase = status.phase;
  form.show(model);
}

/** How old the numbers are, and what is wrong; told anew every second. */
function showHealth() {
  const ageS = answeredMs === null ? null : (performance.now() - answeredMs) / 1000;
  byId("age").textContent = ageS === null ? "" : `${poller.isPaused ? "paused, " : ""}${ago(ageS)}`;
  const isFailing = failure !== null && failure.status !== 401;
  byId("state").classList.toggle("stale", isFailing);
  if (isFailing) {
    byId("phase").textContent = failure.status === 0 ? "unreachable" : "not ready";
    byId("phase").dataset.phase = "bad";
  }
  // The time, not the age: a text that changes every second would be read aloud every second.
  const old = failure?.status === 0 && answeredAt !== null
    ? ` The numbers below are of ${answeredAt.toLocaleTimeString()}.` : "";
  say(byId("trouble"), isFailing ? `${sentence(failure.body.error)} Trying again.${old}` : "");
  const isShown = restartedAt !== null && Date.now() - restartedAt < 1000 * chosenWindowS();
  say(byId("restart"), isShown
    ? `The server was restarted about ${restartedAt.toLocaleTimeString()}: its counters began anew.`
    : "");
}

/** A server's error begins with a small letter and ends without a full stop. */
function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

function askForKey() {
  if (hasKey()) byId("key-note").textContent = "The server refused that key.";
  byId("key-form").hidden = false;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  ask();
});
byId("interval").addEventListener("change", () => {
  poller.intervalMs = Number(byId("interval").value);
});
byId("window").addEventListener("change", () => {
  if (status !== null) draw();
});
setInterval(showHealth, 1000);
