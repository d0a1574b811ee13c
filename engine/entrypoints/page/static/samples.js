// Snapshots of the metrics, kept for a while, and what two of them say about the time between.

/** How long snapshots are kept: the longest window that can be chosen. */
const KEEP_S = 900;

/** The shortest time a chart shows, when less is known. */
const MIN_CHART_S = 30;

const keyOf = (name, labels) => `${name} ${Object.values(labels).join(" ")}`;

/** All metrics at one time. `epoch` grows with each restart: the counters began anew. */
class Snapshot {
  constructor(timeS, epoch, samples) {
    this.timeS = timeS;
    this.epoch = epoch;
    this.byName = new Map();
    this.byKey = new Map();
    for (const sample of samples) {
      const name = sample.name.replace(/^mtserve_/, "");
      if (!this.byName.has(name)) this.byName.set(name, []);
      this.byName.get(name).push(sample);
      this.byKey.set(keyOf(name, sample.labels), sample);
    }
  }

  /** The value with those labels, or 0: a counter that is not there has not counted yet. */
  value(name, labels = {}) {
    return this.byKey.get(keyOf(name, labels))?.value ?? 0;
  }
}

/** The snapshots of the last minutes, oldest first. */
export class Samples {
  #kept = [];

  /** Take in an answer of the server; true when it shows that the server was restarted. */
  add(samples, timeS) {
    const last = this.latest;
    const next = new Snapshot(timeS, last?.epoch ?? 0, samples);
    const restarted = last !== undefined && hasFallen(last, next);
    if (restarted) next.epoch += 1;
    this.#kept.push(next);
    while (this.#kept[0].timeS < timeS - KEEP_S) this.#kept.shift();
    return restarted;
  }

  get latest() {
    return this.#kept.at(-1);
  }

  /** What the last `windowS` seconds brought, as far as they are known and of one server life. */
  recent(windowS) {
    const latest = this.latest;
    const first = this.#kept.find(
      (each) => each.epoch === latest.epoch && each.timeS >= latest.timeS - windowS,
    );
    return new Span(first, latest);
  }

  /** How far back the charts go: the window, or as far as there are snapshots. */
  chartS(windowS) {
    return Math.min(windowS, Math.max(MIN_CHART_S, this.latest.timeS - this.#kept[0].timeS));
  }

  /**
   * Points {timeS, value} of the last `windowS` seconds. `read` gets each snapshot; its value may
   * be null for a gap.
   */
  gauge(windowS, read) {
    return this.#within(windowS).map((each) => ({ timeS: each.timeS, value: read(each) }));
  }

  /** The same, of the spans between neighbours; a restart between them is a gap. */
  rate(windowS, read) {
    const inside = this.#within(windowS);
    return inside.slice(1).map((each, index) => ({
      timeS: each.timeS,
      value: each.epoch === inside[index].epoch ? read(new Span(inside[index], each)) : null,
    }));
  }

  #within(windowS) {
    return this.#kept.filter((each) => each.timeS >= this.latest.timeS - windowS);
  }
}

function hasFallen(before, after) {
  for (const [key, sample] of before.byKey) {
    if (sample.kind === "counter" && (after.byKey.get(key)?.value ?? 0) < sample.value) return true;
  }
  return false;
}

/** From one snapshot to a later one. A span of no length has no rates: they are null. */
export class Span {
  constructor(first, last) {
    this.first = first;
    this.last = last;
    this.lengthS = last.timeS - first.timeS;
  }

  /** How much a counter has risen. */
  rise(name, labels = {}) {
    return this.last.value(name, labels) - this.first.value(name, labels);
  }

  /** That, a second. */
  rate(name, labels = {}) {
    return this.lengthS > 0 ? this.rise(name, labels) / this.lengthS : null;
  }

  /** Rises by label values: [{labels, rise, total}], of every sample of that name. */
  rises(name) {
    return (this.last.byName.get(name) ?? []).map((sample) => ({
      labels: sample.labels,
      rise: sample.value - this.first.value(name, sample.labels),
      total: sample.value,
    }));
  }

  /** The observations of a histogram in this span, per bucket, with the buckets' upper edges. */
  histogram(name) {
    const last = this.last.byKey.get(keyOf(name, {}));
    const first = this.first.byKey.get(keyOf(name, {}));
    if (last === undefined) return { edges: [], counts: [] };
    return {
      edges: last.buckets,
      counts: last.bucket_counts.map((value, index) => value - (first?.bucket_counts[index] ?? 0)),
    };
  }
}

/**
 * What a share `q` of the observations does not exceed, interpolated within the bucket it falls in;
 * Infinity above the last edge, null without observations.
 */
export function quantile({ edges, counts }, q) {
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (total === 0) return null;
  let below = 0;
  for (const [index, inBucket] of counts.entries()) {
    if (inBucket > 0 && below + inBucket >= q * total) {
      if (index === edges.length) return Infinity;
      const low = index === 0 ? 0 : edges[index - 1];
      return low + (edges[index] - low) * Math.max(0, (q * total - below) / inBucket);
    }
    below += inBucket;
  }
  return Infinity;
}

/** Parts of a whole as shares of it; null when the whole is 0. */
export function share(part, whole) {
  return whole > 0 ? part / whole : null;
}
