// Numbers as text. Every function takes null for "not known" and gives a dash.

const UNKNOWN = "\u2013";
const GAP = "\u00a0"; // between a number and its unit, which stay on one line

function rounded(value, digits) {
  return value.toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

/** Three significant digits at most: 0.42, 8.1, 530, 12,800. */
export function number(value) {
  if (value === null) return UNKNOWN;
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 100) return rounded(value, 0);
  return rounded(value, size >= 10 ? 1 : 2);
}

/** A count in full: 1,234,567. */
export function count(value) {
  return value === null ? UNKNOWN : rounded(value, 0);
}

/** A count in few characters: 1.23 M. */
export function short(value) {
  if (value === null) return UNKNOWN;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${number(value / (unit === "k" ? 1e3 : size))}${GAP}${unit}`;
  }
  return number(value);
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function byteUnit(value) {
  return value < 1024 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), BYTE_UNITS.length - 1);
}

const inUnit = (value, unit) => number(unit === 0 ? Math.round(value) : value / 1024 ** unit);

/** Bytes with a binary unit. */
export function bytes(value) {
  if (value === null) return UNKNOWN;
  const unit = byteUnit(value);
  return `${inUnit(value, unit)}${GAP}${BYTE_UNITS[unit]}`;
}

/** So many bytes of so many, in one unit. */
export function bytesOf(part, whole) {
  const unit = byteUnit(whole);
  return `${inUnit(part, unit)} of ${inUnit(whole, unit)}${GAP}${BYTE_UNITS[unit]}`;
}

/** A share in [0, 1] as percent. */
export function percent(value) {
  if (value === null) return UNKNOWN;
  return `${rounded(100 * value, value > 0 && value < 0.9995 ? 1 : 0)}${GAP}%`;
}

/** Seconds in the unit that suits them. */
export function seconds(value) {
  if (value === null) return UNKNOWN;
  if (value < 0.001) return `${number(Math.round(value * 1e6))}${GAP}\u00b5s`;
  if (value < 1) return `${number(value * 1e3)}${GAP}ms`;
  if (value < 120) return `${number(value)}${GAP}s`;
  if (value < 7200) return `${rounded(value / 60, 0)}${GAP}min`;
  if (value < 172800) return `${rounded(value / 3600, 0)}${GAP}h`;
  return `${rounded(value / 86400, 0)}${GAP}d`;
}

/** How long ago, in whole units. */
export function ago(value) {
  if (value === null) return UNKNOWN;
  return value < 1 ? "just now" : `${seconds(Math.floor(value))} ago`;
}

/** A score: four digits after the point, or an exponent where that would show nothing. */
export function score(value) {
  const size = Math.abs(value);
  return size === 0 || (size >= 0.001 && size < 1e6) ? rounded(value, 4) : value.toExponential(3);
}
