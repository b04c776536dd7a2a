"use strict";
// Sizes and times as Rockmate writes them, and small helpers to build elements without any markup from data.

const digitsAfterPoint = (value) => (Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0);

/** As Python rounds: what is just between two goes to the even one. */
function fixed(value, digits) {
  const scaled = value * 10 ** digits, low = Math.floor(scaled);
  const isTie = scaled - low === 0.5 && (2 * low + 1) % 5 ** digits === 0;
  return isTie ? ((low % 2 ? low + 1 : low) / 10 ** digits).toFixed(digits) : value.toFixed(digits);
}

function formatBytes(size) {
  if (Math.abs(size) < 1024) return `${fixed(size, 0)} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.floor(Math.log2(Math.abs(size))) / 10), units.length);
  const scaled = size / 1024 ** power;
  return `${fixed(scaled, digitsAfterPoint(scaled))} ${units[power - 1]}`;
}

function formatMs(time) {
  if (Math.abs(time) < 1) return `${fixed(time * 1000, 0)} µs`;
  if (Math.abs(time) < 1000) return `${fixed(time, digitsAfterPoint(time))} ms`;
  const seconds = time / 1000;
  return Math.abs(seconds) < 120 ? `${fixed(seconds, digitsAfterPoint(seconds))} s` : `${fixed(seconds / 60, 1)} min`;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Most bytes that a chart has room for: a budget that is far from all else is told, and not drawn. */
function mostShown(budget, ...others) {
  const highest = Math.max(1, ...others);
  return budget <= 2 * highest ? Math.max(budget, highest) : highest;
}

/** A text that may be broken after what joins the parts of a name. */
function breakable(text) {
  const parts = text.split(/(?<=[_.:,/])(?=[^_.:,/\s])/), made = document.createDocumentFragment();
  parts.forEach((part, k) => made.append(...(k ? [element("wbr")] : []), part));
  return made;
}

/** About `count` round values from `low` to `high`. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((width) => width >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9); at++) found.push(at * step);
  return found;
}

/** Ticks for sizes, round in the unit that they are written in. */
function byteTicks(most, count) {
  const unit = 1024 ** Math.min(4, Math.floor(Math.log2(Math.max(1, most)) / 10));
  return ticks(0, most / unit, count).map((value) => value * unit);
}

/** A tick as text: as few digits as tell ticks apart. */
function tickText(value, unitName, unit) {
  return `${Number((value / unit).toPrecision(6))} ${unitName}`;
}

function byteTickText(size, most) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, most)) / 10));
  return size === 0 ? "0" : tickText(size, ["B", "KiB", "MiB", "GiB", "TiB"][power], 1024 ** power);
}

function timeTickText(time, most) {
  if (time === 0) return "0";
  return most >= 2000 ? tickText(time, "s", 1000) : most >= 2 ? tickText(time, "ms", 1) : tickText(time, "µs", 0.001);
}

/** The last index whose value is at most `wanted`, in ascending values; 0 where none is. */
function lastAtMost(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle - 1;
  }
  return low;
}
