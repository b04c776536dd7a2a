// Memory over the step, above the operations in lanes; both share one axis and one cursor.

const LAYERS = [
  ["kept", "kept from the forward"],
  ["recomputed", "recomputed"],
  ["gradients", "gradients"],
  ["workspace", "workspace"],
];
const LANES = { f: "forward", r: "recompute", b: "backward" };
const LANE_ORDER = ["f", "r", "b"];
const LINKS = { o: "out", i: "back" }; // to a second memory, where something moves there
const LEFT = 78, RIGHT = 14, TOP = 12, LANE = 24, LANE_GAP = 5, AXIS = 26;

/** The step as arrays, one value for each computation. */
function stepOf(data) {
  const { lane, index, stage } = data.steps;
  const count = lane.length;
  const [start, end, total] = [0, 1, 2].map(() => new Float64Array(count));
  const times = { f: data.forward.time, r: data.forward.again, b: data.backward.time };
  let now = 0;
  for (let at = 0; at < count; at++) {
    now += data.steps.wait[at] || 0;
    start[at] = now;
    now += times[lane[at]][index[at]];
    end[at] = now;
    for (const [name] of LAYERS) total[at] += data.steps[name][at];
  }
  let peak = 0;
  for (let at = 1; at < count; at++) if (total[at] > total[peak]) peak = at;
  return { data, count, lane, index, stage, start, end, total, peak, length: now, keepAll: keepAllOf(data) };
}

/** Keep-all's step: each operation once. `at` is when it runs there, `of` which computation of the plan it is. */
function keepAllOf(data) {
  const { lane, index } = data.steps, of = [], start = [], end = [];
  for (let at = 0; at < lane.length; at++) if (lane[at] !== "r") of.push(at);
  let now = 0;
  for (const at of of) {
    start.push(now);
    now += (lane[at] === "b" ? data.backward : data.forward).time[index[at]];
    end.push(now);
  }
  return { of, start, end, bytes: data.keepAll, most: data.keepAll.reduce((most, size) => Math.max(most, size), 0) };
}

class StepChart {
  constructor(host, step, listeners) {
    Object.assign(this, { host, step, listeners, axis: "time", cursor: -1, chosen: -1, stays: [], shown: {} });
    const { data } = step;
    this.most = 1.06 * mostShown(data.budget, step.total[step.peak], step.keepAll.most, ...this.measuredPeaks());
    this.reset();
    new ResizeObserver(() => this.draw()).observe(host);
    this.listen();
  }

  measuredPeaks() {
    const { measured } = this.step.data;
    return measured ? [measured.plan.peak, measured.eager ? measured.eager.peak : 0] : [];
  }

  // ---- the axis ----

  get span() {
    if (this.axis === "order") return this.step.count;
    return Math.max(this.step.length, 1e-9);
  }
  startOf(at) { return this.axis === "order" ? at : this.step.start[at]; }
  endOf(at) { return this.axis === "order" ? at + 1 : this.step.end[at]; }
  x(value) { return LEFT + ((value - this.from) / (this.to - this.from)) * this.width; }
  value(x) { return this.from + ((x - LEFT) / this.width) * (this.to - this.from); }
  y(size) { return TOP + this.height * (1 - size / this.most); }

  reset() { this.from = 0; this.to = this.span; this.draw(); }

  setAxis(axis) {
    const first = this.indexAt(this.from), last = this.indexAt(this.to);
    const whole = this.to - this.from >= this.span * 0.999;
    this.axis = axis;
    if (whole) return this.reset();
    this.show(this.startOf(first), this.endOf(last));
  }

  /** Show a stretch of the axis, not smaller than some computations. */
  show(from, to) {
    const least = this.axis === "order" ? Math.min(4, this.span) : this.span / Math.max(50, this.step.count * 4);
    const width = Math.min(this.span, Math.max(least, to - from)), middle = (from + to) / 2;
    this.from = Math.max(0, Math.min(this.span - width, middle - width / 2));
    this.to = this.from + width;
    this.draw();
  }

  zoom(factor, around) {
    const at = around ?? (this.cursor >= 0 ? this.startOf(this.cursor) : (this.from + this.to) / 2);
    const left = (at - this.from) * factor, right = (this.to - at) * factor;
    this.show(at - left, at + right);
  }

  indexAt(value) {
    if (this.axis === "order") return Math.max(0, Math.min(this.step.count - 1, Math.floor(value)));
    return lastAtMost(this.step.start, value);
  }

  // ---- drawing ----

  draw() {
    const total = this.host.clientWidth;
    if (!total) return;
    this.width = Math.max(120, total - LEFT - RIGHT);
    this.height = total < 560 ? 210 : 300;
    const lanesTop = TOP + this.height + 12;
    this.links = this.axis !== "order" && this.step.data.links.lane ? Object.keys(LINKS) : [];
    const rows = LANE_ORDER.length + this.links.length + (this.stays.length ? 1 : 0);
    this.lanesEnd = lanesTop + rows * (LANE + LANE_GAP);
    const tall = this.lanesEnd + AXIS;
    const svg = shape("svg", { viewBox: `0 0 ${total} ${tall}`, width: total, height: tall, "aria-hidden": "true" });
    const clip = shape("clipPath", { id: "plot" }, shape("rect", { x: LEFT, y: 0, width: this.width, height: tall }));
    svg.append(shape("defs", {}, clip), this.grid(lanesTop));
    const plot = shape("g", { "clip-path": "url(#plot)" });
    const [first, last] = [this.indexAt(this.from), this.indexAt(this.to)];
    for (const [name, path] of this.layerPaths(first, last)) plot.append(shape("path", { class: name, d: path }));
    plot.append(...this.lines());
    svg.append(plot, ...this.lanes(lanesTop, first, last), ...this.budgetLine());
    this.overlay = shape("g", { "clip-path": "url(#plot)" });
    svg.append(this.overlay);
    this.host.replaceChildren(svg);
    this.mark();
  }

  grid(lanesTop) {
    const group = shape("g"), right = LEFT + this.width;
    for (const size of byteTicks(this.most, this.height / 55)) {
      const y = this.y(size);
      group.append(shape("line", { class: size ? "gridline" : "axis", x1: LEFT, x2: right, y1: y, y2: y }));
      group.append(shape("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, byteTickText(size, this.most)));
    }
    const bottom = this.lanesEnd + 2, count = this.width / 95;
    let values = ticks(this.from, this.to, count);
    if (this.axis === "order") values = values.filter(Number.isInteger);
    for (const value of values) {
      const x = this.x(value), text = this.axis === "order" ? String(value) : timeTickText(value, this.span);
      group.append(shape("line", { class: "gridline", x1: x, x2: x, y1: TOP, y2: bottom }));
      const anchor = x > right - 20 ? "end" : x < LEFT + 12 ? "start" : "middle";
      group.append(shape("text", { x, y: bottom + 16, "text-anchor": anchor }, text));
    }
    return group;
  }

  /** Bytes in layers, one upon the other. */
  layerPaths(first, last) {
    const { data } = this.step, below = new Float64Array(last - first + 1), found = [];
    for (const [name] of LAYERS) {
      const sizes = data.steps[name], up = [], down = [];
      for (let at = first; at <= last; at++) {
        const left = this.x(this.startOf(at)).toFixed(1), right = this.x(this.endOf(at)).toFixed(1);
        const low = below[at - first], high = low + (this.shown[name] === false ? 0 : sizes[at]);
        up.push(`${left},${this.y(high).toFixed(1)} ${right},${this.y(high).toFixed(1)}`);
        down.push(`${right},${this.y(low).toFixed(1)} ${left},${this.y(low).toFixed(1)}`);
        below[at - first] = high;
      }
      found.push([name, `M${up.join(" ")} ${down.reverse().join(" ")}Z`]);
    }
    return found;
  }

  lines() {
    const found = [], { keepAll, data } = this.step, { measured } = data;
    if (this.shown.keepAll !== false) {
      let path = "";
      keepAll.of.forEach((at, k) => {
        const [left, right] = this.axis === "order" ? [at, at + 1] : [keepAll.start[k], keepAll.end[k]];
        const [x, y] = [this.x(left).toFixed(1), this.y(keepAll.bytes[k]).toFixed(1)];
        path += `${k ? `H${x}V${y}` : `M${x},${y}`}H${this.x(right).toFixed(1)}`;
      });
      found.push(shape("path", { class: "line keepall-line", d: path }));
    }
    if (measured && this.axis === "time") {
      const steps = [
        ["measured", measured.plan, "measured-line"],
        ["measuredEager", measured.eager, "measured-eager-line"],
      ];
      for (const [name, real, style] of steps) {
        if (!real || this.shown[name] === false) continue;
        const [x, y] = [(time) => this.x(time).toFixed(1), (size) => this.y(size).toFixed(1)];
        const path = real.at.map((time, k) => `H${x(time)}V${y(real.bytes[k])}`).join("");
        found.push(shape("path", { class: `line ${style}`, d: `M${x(0)},${y(0)}${path}` }));
      }
    }
    return found;
  }

  budgetLine() {
    const { budget } = this.step.data, y = this.y(budget), right = LEFT + this.width;
    const label = (top, text) =>
      shape("text", { class: "budget-label halo", x: right - 4, y: top, "text-anchor": "end" }, text);
    const text = `budget ${formatBytes(budget)}`;
    if (budget > this.most) return [label(TOP + 10, `${text} ↑`)];
    return [shape("line", { class: "budget", x1: LEFT, x2: right, y1: y, y2: y }), label(y - 7, text)];
  }

  lanes(top, first, last) {
    const found = [], { lane } = this.step;
    LANE_ORDER.forEach((letter, row) => {
      const y = top + row * (LANE + LANE_GAP);
      let path = "";
      for (let at = first; at <= last; at++) {
        if (lane[at] !== letter) continue;
        const left = this.x(this.startOf(at)), right = this.x(this.endOf(at)), width = right - left;
        const seam = width > 4 ? 1 : 0; // neighbours are told apart where there is room
        path += `M${left.toFixed(2)},${y}h${Math.max(0.4, width - seam).toFixed(2)}v${LANE}H${left.toFixed(2)}Z`;
      }
      found.push(this.laneBack(y, LANES[letter]));
      found.push(shape("path", { class: LANES[letter], d: path, "clip-path": "url(#plot)" }));
    });
    this.links.forEach((letter, row) => {
      const y = top + (LANE_ORDER.length + row) * (LANE + LANE_GAP), { lane, start, end } = this.step.data.links;
      let path = "";
      for (let at = 0; at < lane.length; at++) {
        if (lane[at] !== letter) continue;
        const left = this.x(start[at]), width = this.x(end[at]) - left;
        path += `M${left.toFixed(2)},${y}h${Math.max(0.4, width).toFixed(2)}v${LANE}H${left.toFixed(2)}Z`;
      }
      found.push(this.laneBack(y, LINKS[letter]));
      found.push(shape("path", { class: "link", d: path, "clip-path": "url(#plot)" }));
    });
    if (this.stays.length) {
      const y = top + (LANE_ORDER.length + this.links.length) * (LANE + LANE_GAP), group = shape("g", { "clip-path": "url(#plot)" });
      for (let k = 0; k < this.stays.length; k += 2) {
        const left = this.x(this.startOf(this.stays[k])), right = this.x(this.endOf(this.stays[k + 1]));
        group.append(shape("rect", { class: "stay", x: left, y, width: Math.max(1, right - left), height: LANE }));
      }
      found.push(this.laneBack(y, "in memory"), group);
    }
    return found;
  }

  laneBack(y, name) {
    return shape(
      "g", {},
      shape("rect", { class: "lane-back", x: LEFT, y, width: this.width, height: LANE }),
      shape("text", { x: LEFT - 8, y: y + LANE / 2 + 4, "text-anchor": "end" }, name),
    );
  }

  /** What moves without the rest being drawn again: cursor, chosen moment, the stretch that is dragged over. */
  mark() {
    if (!this.overlay) return;
    const bottom = this.lanesEnd, marks = [];
    const band = (style, left, right) =>
      shape("rect", { class: style, x: left, y: TOP, width: Math.max(1, right - left), height: bottom - TOP });
    if (this.dragged) marks.push(band("dragged", Math.min(...this.dragged), Math.max(...this.dragged)));
    for (const [style, at] of [["chosen-line", this.chosen], ["cursor-line", this.cursor]]) {
      if (at < 0) continue;
      const left = this.x(this.startOf(at)), right = this.x(this.endOf(at)), middle = (left + right) / 2;
      if (style === "cursor-line") marks.push(band("cursor", left, right));
      marks.push(shape("line", { class: style, x1: middle, x2: middle, y1: TOP, y2: bottom }));
      if (style === "chosen-line")
        marks.push(shape("path", { class: "chosen-mark", d: `M${middle - 5},${TOP - 8}h10l-5,7Z` }));
    }
    this.overlay.replaceChildren(...marks);
  }

  // ---- pointer and keys ----

  moveTo(at, event) {
    this.cursor = at < 0 ? -1 : Math.max(0, Math.min(this.step.count - 1, at));
    if (this.cursor >= 0 && !event) {
      const left = this.startOf(this.cursor), right = this.endOf(this.cursor), width = this.to - this.from;
      if (left < this.from) this.show(left - width / 4, left + (3 * width) / 4);
      else if (right > this.to) this.show(right - (3 * width) / 4, right + width / 4);
    }
    this.mark();
    this.listeners.moved(this.cursor, event);
  }

  choose(at) { this.chosen = at; this.mark(); this.listeners.chosen(at); }

  listen() {
    const { host } = this, within = (event) => event.clientX - host.getBoundingClientRect().left;
    const inPlot = (x) => x >= LEFT && x <= LEFT + this.width;
    let pressed = null;
    host.addEventListener("pointermove", (event) => {
      const x = within(event);
      if (pressed !== null && Math.abs(x - pressed) > 6)
        this.dragged = [pressed, Math.max(LEFT, Math.min(LEFT + this.width, x))];
      if (inPlot(x)) this.moveTo(this.indexAt(this.value(x)), event);
      else if (pressed === null) this.moveTo(-1, event);
    });
    host.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch" || !inPlot(within(event))) return;
      pressed = within(event);
      host.setPointerCapture(event.pointerId);
    });
    const release = (event) => {
      const dragged = this.dragged;
      this.dragged = null;
      if (dragged) this.show(this.value(Math.min(...dragged)), this.value(Math.max(...dragged)));
      else if (event.type === "pointerup" && inPlot(within(event))) {
        const at = this.indexAt(this.value(within(event)));
        if (event.pointerType === "touch") this.moveTo(at);
        this.choose(at);
      }
      pressed = null;
    };
    host.addEventListener("pointerup", release);
    host.addEventListener("pointercancel", release);
    host.addEventListener("pointerleave", (event) => { if (pressed === null) this.moveTo(-1, event); });
    host.addEventListener("dblclick", () => this.reset());
    host.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.value(within(event)));
    }, { passive: false });
    host.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1, { step } = this;
    const keys = {
      ArrowRight: () => this.moveTo(this.cursor + far),
      ArrowLeft: () => this.moveTo(Math.max(0, this.cursor - far)),
      Home: () => this.moveTo(0),
      End: () => this.moveTo(step.count - 1),
      p: () => this.moveTo(step.peak),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.reset(),
      Enter: () => this.choose(this.cursor < 0 ? step.peak : this.cursor),
      Escape: () => this.moveTo(-1),
    };
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}
