// Memory against time: the plans of several solvers, each with a colour and a shape of its own.

const MARKS = {
  circle: (x, y, r) => shape("circle", { cx: x, cy: y, r }),
  square: (x, y, r) => shape("rect", { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8 }),
  diamond: (x, y, r) => {
    const s = 1.3 * r;
    return shape("path", { d: `M${x},${y - s}l${s},${s}l${-s},${s}l${-s},${-s}Z` });
  },
  triangle: (x, y, r) => shape("path", { d: `M${x},${y - r * 1.2}L${x + r * 1.2},${y + r}H${x - r * 1.2}Z` }),
  down: (x, y, r) => shape("path", { d: `M${x},${y + r * 1.2}L${x + r * 1.2},${y - r}H${x - r * 1.2}Z` }),
  cross: (x, y, r) =>
    shape("path", { d: `M${x - r},${y - r}l${2 * r},${2 * r}m${-2 * r},0l${2 * r},${-2 * r}`, class: "crossed" }),
};
const SERIES = [["circle", 1], ["square", 2], ["diamond", 3], ["triangle", 4], ["down", 5], ["cross", 6]];

class Scatter {
  constructor(host, legend, data, tip) {
    Object.assign(this, { host, data, tip });
    this.base = data.keepAllTime || 1;
    const names = [...new Set(data.points.map(([solver]) => solver))];
    this.series = names.map((name, k) => ({
      name,
      mark: SERIES[k % SERIES.length][0],
      style: `series-${SERIES[k % SERIES.length][1]}`,
      points: data.points.filter(([solver]) => solver === name).map(([, peak, time]) => ({ name, peak, time })),
    }));
    this.own = { name: `this plan (${data.solver})`, peak: data.peak, time: data.time };
    const own = this.legendEntry({ name: this.own.name, own: true });
    legend.append(...this.series.map((one) => this.legendEntry(one)), own);
    new ResizeObserver(() => this.draw()).observe(host);
    host.addEventListener("pointermove", (event) => this.hover(event));
    host.addEventListener("pointerleave", () => this.tip.hide());
  }

  legendEntry(one) {
    const mark = one.own ? star(9, 6, 6) : MARKS[one.mark](9, 6, 4.5);
    const sign = shape("g", { class: one.own ? "own" : one.style }, mark);
    return element("span", {}, shape("svg", { "aria-hidden": "true" }, sign), one.name);
  }

  extra(time) { return time / this.base - 1; }

  /** The axis of time ends with the plans that anyone would take; slower ones are at its edge, with their number. */
  limits() {
    const all = [this.own, ...this.series.flatMap((one) => one.points)];
    const limit = Math.max(1, 2 * this.extra(this.own.time));
    const usual = all.map((point) => this.extra(point.time)).filter((extra) => extra <= limit);
    const most = 1.06 * mostShown(this.data.budget, ...all.map((point) => point.peak));
    return { most, slowest: Math.max(0.01, 1.12 * Math.max(...usual)) };
  }

  draw() {
    const total = this.host.clientWidth;
    if (!total) return;
    const height = total < 560 ? 240 : 320, width = total - LEFT - RIGHT, bottom = height - 44;
    const { most, slowest } = this.limits(), x = (peak) => LEFT + (peak / most) * width;
    const y = (time) => bottom - (Math.min(this.extra(time), slowest) / slowest) * (bottom - 16);
    const svg = shape("svg", { viewBox: `0 0 ${total} ${height}`, width: total, height });
    for (const extra of ticks(0, slowest, 5)) {
      const at = bottom - (extra / slowest) * (bottom - 16);
      svg.append(shape("line", { class: extra ? "gridline" : "axis", x1: LEFT, x2: LEFT + width, y1: at, y2: at }));
      const text = `+${Number((100 * extra).toPrecision(3))} %`;
      svg.append(shape("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, text));
    }
    for (const size of byteTicks(most, width / 100)) {
      svg.append(shape("line", { class: "gridline", x1: x(size), x2: x(size), y1: 16, y2: bottom }));
      svg.append(shape("text", { x: x(size), y: bottom + 18, "text-anchor": "middle" }, byteTickText(size, most)));
    }
    svg.append(shape("text", { x: LEFT + width, y: bottom + 36, "text-anchor": "end" }, "predicted peak"));
    svg.append(shape("text", { x: LEFT + 6, y: 12 }, "extra time"));
    const beyond = this.data.budget > most, budget = x(beyond ? most : this.data.budget);
    if (!beyond) svg.append(shape("line", { class: "budget", x1: budget, x2: budget, y1: 16, y2: bottom }));
    this.places = [];
    for (const one of this.series) svg.append(this.drawn(one, x, y, slowest));
    const text = `budget ${formatBytes(this.data.budget)}${beyond ? " →" : ""}`;
    const [side, anchor] = budget > LEFT + 0.8 * width ? [-6, "end"] : [6, "start"];
    svg.append(shape("text", { class: "budget-label halo", x: budget + side, y: 28, "text-anchor": anchor }, text));
    svg.append(shape("g", { class: "own" }, star(x(this.own.peak), y(this.own.time), 9)));
    this.places.push([x(this.own.peak), y(this.own.time), this.own]);
    this.host.replaceChildren(svg);
  }

  drawn(one, x, y, slowest) {
    const group = shape("g", { class: one.style });
    const within = one.points.filter((point) => this.extra(point.time) <= slowest);
    const places = within.map((point) => `${x(point.peak).toFixed(1)},${y(point.time).toFixed(1)}`);
    const line = `M${places.join("L")}`;
    if (within.length > 1) group.append(shape("path", { class: "line series-line", d: line }));
    for (const point of one.points) {
      const beyond = this.extra(point.time) > slowest, [left, top] = [x(point.peak), y(point.time)];
      group.append(MARKS[one.mark](left, top, 4));
      this.places.push([left, top, point]);
      if (beyond && one.points.length === 1) {
        const text = `${one.name} ${(point.time / this.base).toFixed(1)}× ↑`;
        group.append(shape("text", { class: "halo", x: left + 9, y: top + 4 }, text));
      }
    }
    return group;
  }

  hover(event) {
    const box = this.host.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null, least = 18 ** 2;
    for (const [left, top, point] of this.places ?? []) {
      const far = (left - x) ** 2 + (top - y) ** 2;
      if (far <= least) [best, least] = [point, far];
    }
    if (!best) return this.tip.hide();
    const extra = `+${fixed(100 * this.extra(best.time), 1)} %`;
    const rows = [[null, "peak", formatBytes(best.peak)], [null, "time", formatMs(best.time)], [null, "extra", extra]];
    this.tip.show(event, best.name, [], rows);
  }
}

function star(x, y, r) {
  const points = [];
  for (let k = 0; k < 10; k++) {
    const far = k % 2 ? r * 0.45 : r, turn = (Math.PI * k) / 5 - Math.PI / 2;
    points.push(`${(x + far * Math.cos(turn)).toFixed(2)},${(y + far * Math.sin(turn)).toFixed(2)}`);
  }
  return shape("polygon", { points: points.join(" ") });
}
