// The inputs a model declares, and texts of numbers as its JSON.

/** What the form needs of the metadata of a model (`GET /v2/models/{name}`). */
export function declaredInputs({ inputs, parameters }) {
  const features = (prefix) => inputs
    .filter((input) => input.name.startsWith(prefix))
    .map((input) => ({
      name: input.name.slice(prefix.length),
      isFloat: input.datatype === "FP32",
      width: input.shape[1] ?? 0,
    }));
  return {
    history: features("history_"),
    candidates: features("candidate_"),
    context: parameters.context_features,
    tasks: parameters.tasks.filter((task) => task === "rank" || task === "retrieve"),
    readsQueryTime: parameters.reads_query_time,
    scoreNames: parameters.score_names,
    sampleItems: parameters.sample_items,
  };
}

/** A text that is no such number; `field` is the control it stands in. */
export class BadInput extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

const INTEGER = /^[+-]?\d+$/;

/** One number as JSON. Integers beyond 2^53 keep all their digits where the browser can. */
function parsed(token, isFloat, field) {
  const value = Number(token);
  if (isFloat ? !Number.isFinite(value) : !INTEGER.test(token)) {
    const wanted = isFloat ? "a number" : "an integer";
    throw new BadInput(`${field.dataset.name}: "${token}" is not ${wanted}`, field);
  }
  const isExact = isFloat || Number.isSafeInteger(value) || JSON.rawJSON === undefined;
  return isExact ? value : JSON.rawJSON(token.replace("+", ""));
}

/** The separate texts of a control: by commas and white space. */
export function tokens(text) {
  return text.split(/[\s,;]+/).filter((token) => token !== "");
}

/** The numbers in a control, as a list; of a vector feature one list per line. */
export function numbers(field, { isFloat = false, width = 0 } = {}) {
  const listed = (text) => tokens(text).map((token) => parsed(token, isFloat, field));
  if (width === 0) return listed(field.value);
  return field.value.split("\n").filter((row) => row.trim() !== "").map(listed);
}

/** The one number in a control, or null when it is empty. */
export function optionalNumber(field, isFloat = false) {
  const text = field.value.trim();
  return text === "" ? null : parsed(text, isFloat, field);
}

/** How many entries a control holds. */
export function entries(field, width = 0) {
  if (width === 0) return tokens(field.value).length;
  return field.value.split("\n").filter((row) => row.trim() !== "").length;
}
