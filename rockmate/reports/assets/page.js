// The page: charts, tables and what they tell each other.

const MOST_IN_MEMORY = 12; // tensors of a moment that are listed

class Tip {
  constructor(host) { this.host = host; }

  /** rows: [kind of its swatch or null, name, value]; the last is the sum. */
  show(event, title, lines, rows) {
    const cells = rows.map(([kind, name, value]) => {
      const first = element("td", {}, ...(kind ? [element("span", { class: `swatch ${kind}` })] : []), name);
      return element("tr", {}, first, element("td", {}, value));
    });
    const table = element("table", {}, element("tbody", {}, ...cells));
    const besides = lines.map((line) => element("span", { class: "beside" }, line));
    this.host.replaceChildren(element("b", {}, title), ...besides, table);
    this.host.hidden = false;
    const { width, height } = this.host.getBoundingClientRect(), gap = 16;
    const left = event.clientX + gap + width > innerWidth ? event.clientX - gap - width : event.clientX + gap;
    const top = Math.min(event.clientY + gap, innerHeight - height - 8);
    this.host.style.left = `${Math.max(4, left)}px`;
    this.host.style.top = `${Math.max(4, top)}px`;
  }

  hide() { this.host.hidden = true; }
}

class Page {
  constructor(data) {
    this.data = data;
    this.step = stepOf(data);
    this.tip = new Tip(this.at("tip"));
    this.firstOf = new Map();
    for (let at = 0; at < this.step.count; at++)
      if (this.step.lane[at] === "f") this.firstOf.set(this.step.index[at], at);
    this.chart = new StepChart(this.at("chart"), this.step, {
      moved: (at, event) => this.moved(at, event),
      chosen: (at) => this.moment(at),
    });
    this.legend();
    this.controls();
    this.moment(this.step.peak);
    this.scatter = new Scatter(this.at("pareto"), this.at("pareto-legend"), data, this.tip);
    this.paretoTable();
    this.operations();
    this.tensors();
  }

  at(id) { return document.getElementById(id); }
  text(number) { return this.data.texts[number]; }

  // ---- the step ----

  /** What a computation is, in words: its name, what for, and where. */
  told(at) {
    const { step, data } = this, letter = step.lane[at], index = step.index[at];
    const ops = letter === "b" ? data.backward : data.forward;
    const stageName = (stage) => data.backward.op[stage] || "the loss";
    const what = {
      f: `compute ${ops.name[index]}`,
      r: `recompute ${ops.name[index]}`,
      b: data.backward.op[index] ? `backward of ${data.backward.op[index]}` : "the loss and its backward",
    }[letter];
    const purpose = letter === "r" ? `for the backward of ${stageName(step.stage[at])}` : "";
    const place = [this.text(ops.module[index]), this.text(ops.source[index])].filter(Boolean).join(" · ");
    const times = `${formatMs(step.end[at] - step.start[at])}, from ${formatMs(step.start[at])}`;
    const when = `${times} · step ${at + 1} of ${step.count}`;
    return { what, lines: [purpose, this.text(ops.function[index]), place, when].filter(Boolean) };
  }

  parts(at) {
    const { step, data } = this;
    const rows = LAYERS.map(([name, title]) => [name, title, data.steps[name][at]]).filter(([, , size]) => size);
    return [...rows, [null, "in memory", step.total[at]]].map(([kind, name, size]) => [kind, name, formatBytes(size)]);
  }

  moved(at, event) {
    const readout = this.at("readout");
    if (at < 0) { this.tip.hide(); return; }
    const { what, lines } = this.told(at), parts = this.parts(at);
    const bytes = parts.map(([, name, size]) => `${name} ${size}`).join(", ");
    readout.replaceChildren(element("strong", {}, what), ` · ${lines.join(" · ")} · ${bytes}`);
    if (event) this.tip.show(event, what, lines, parts);
    else this.tip.hide();
  }

  legend() {
    const { chart, data, step } = this, host = this.at("legend");
    const box = (name) => shape("rect", { class: name, width: 18, height: 12, rx: 2 });
    const stroke = (name) => shape("line", { class: name, x1: 0, x2: 18, y1: 6, y2: 6 });
    const rows = LAYERS.map(([name, title]) => [name, title, box(name)]);
    rows.push(["keepAll", `keep all, ${formatBytes(step.keepAll.most)} at most`, stroke("keepall-line")]);
    if (data.measured) {
      rows.push(["measured", `measured, ${formatBytes(data.measured.plan.peak)} at most`, stroke("measured-line")]);
      const { eager } = data.measured;
      const most = eager ? `eager measured, ${formatBytes(eager.peak)} at most` : "";
      if (eager) rows.push(["measuredEager", most, stroke("measured-eager-line")]);
    }
    for (const [name, title, sign] of rows) {
      const input = element("input", { type: "checkbox", checked: true });
      input.addEventListener("change", () => { chart.shown[name] = input.checked; chart.draw(); });
      host.append(element("label", {}, input, shape("svg", { "aria-hidden": "true" }, sign), title));
    }
  }

  controls() {
    const { chart } = this;
    for (const radio of document.querySelectorAll('input[name="axis"]'))
      radio.addEventListener("change", () => chart.setAxis(radio.value));
    this.at("zoom-in").addEventListener("click", () => chart.zoom(0.5));
    this.at("zoom-out").addEventListener("click", () => chart.zoom(2));
    this.at("zoom-all").addEventListener("click", () => chart.reset());
    this.at("to-peak").addEventListener("click", () => chart.choose(this.step.peak));
  }

  // ---- what is in memory at a moment ----

  moment(at) {
    const { step, data } = this, isPeak = at === step.peak, { tensors } = data;
    this.chart.chosen = at;
    this.chart.mark();
    this.at("moment-title").textContent = isPeak ? "In memory at the peak" : "In memory at the chosen moment";
    this.at("to-peak").hidden = isPeak;
    const { what, lines } = this.told(at);
    this.at("moment-story").textContent = `${formatBytes(step.total[at])} at ${what}. ${lines.join(" · ")}.`;
    const rows = [];
    let counted = 0;
    tensors.stays.forEach((stays, k) => {
      for (let s = 0; s < stays.length; s += 2) {
        if (stays[s] > at || stays[s + 1] < at) continue;
        counted += tensors.bytes[k];
        const is = s ? "recomputed" : this.since(k, at);
        rows.push({ name: tensors.name[k], index: k, is, size: tensors.bytes[k], kind: s ? "recomputed" : "kept" });
      }
    });
    const [gradients, workspace] = [data.steps.gradients[at], data.steps.workspace[at]];
    const states = step.total[at] - counted - gradients - workspace;
    const others = [
      ["gradients", "of the backward", gradients, "gradients"],
      ["workspace", `of ${what}`, workspace, "workspace"],
      ["random states", "for recomputations", states, "kept"],
    ];
    for (const [name, is, size, kind] of others) if (size > 0) rows.push({ name, index: -1, is, size, kind });
    rows.sort((a, b) => b.size - a.size);
    this.at("moment").replaceChildren(this.momentTable(rows, step.total[at]));
  }

  since(tensor, at) {
    return this.step.lane[at] === "f" ? "of the forward" : this.text(this.data.tensors.decision[tensor]);
  }

  momentTable(rows, total) {
    const shown = rows.slice(0, MOST_IN_MEMORY), rest = rows.slice(MOST_IN_MEMORY);
    const most = (rows.length && rows[0].size) || 1;
    const part = (size) => (total ? `${fixed((100 * size) / total, 1)} %` : "");
    const drawn = (title, cells) => {
      const others = cells.map(([style, cell]) => element("td", { class: style }, cell));
      return element("tr", {}, element("th", { scope: "row" }, title), ...others);
    };
    const body = shown.map(({ name, index, is, size, kind }) => {
      const bar = shape("rect", { class: kind, height: "100%", rx: 2, width: `${((100 * size) / most).toFixed(2)}%` });
      const meter = shape("svg", { class: "meter", "aria-hidden": "true" }, bar);
      const title = index < 0 ? name : this.link(name, () => this.showTensor(index));
      return drawn(title, [["", is], ["number", formatBytes(size)], ["number", part(size)], ["", meter]]);
    });
    if (rest.length) {
      const size = rest.reduce((sum, row) => sum + row.size, 0);
      const cells = [["", ""], ["number", formatBytes(size)], ["number", part(size)], ["", ""]];
      body.push(drawn(`${rest.length} more`, cells));
    }
    const heads = [["what", ""], ["is", ""], ["bytes", "number"], ["share", "number"], ["", ""]];
    const head = heads.map(([title, style]) =>
      title ? element("th", { scope: "col", class: style }, title) : element("td"));
    return element(
      "table", { class: "rows" },
      element("caption", { class: "hidden" }, "The largest that is in memory"),
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...body),
    );
  }

  link(text, act) {
    const button = element("button", { type: "button", class: "link" }, breakable(text));
    button.addEventListener("click", act);
    return button;
  }

  /** Draw when a tensor is in memory. */
  showTensor(index) {
    const { chart, data } = this;
    chart.stays = data.tensors.stays[index];
    chart.reset();
    const { tensors } = data, stays = chart.stays.length / 2;
    const often = `in memory ${stays === 1 ? "once" : `${stays} times`}`;
    const facts = [formatBytes(tensors.bytes[index]), often, this.text(tensors.decision[index])].join(" · ");
    const told = ` · ${facts}. ${this.text(tensors.why[index])}`;
    this.at("readout").replaceChildren(element("strong", {}, tensors.name[index]), told);
    this.at("step").scrollIntoView({ block: "start" });
  }

  showOperation(index) {
    this.chart.moveTo(this.firstOf.get(index));
    this.at("step").scrollIntoView({ block: "start" });
    this.at("chart").focus({ preventScroll: true });
  }

  // ---- tables ----

  paretoTable() {
    const { data } = this, extra = (time) => time / (data.keepAllTime || 1) - 1;
    const rows = data.points.map(([solver, peak, time]) => ({ solver, peak, time, extra: extra(time) }));
    const solver = `this plan (${data.solver})`;
    rows.push({ solver, peak: data.peak, time: data.time, extra: extra(data.time), chosen: true });
    new Table(this.at("pareto-table"), {
      caption: "plans of several solvers",
      columns: [
        { key: "solver", title: "solver", kind: "text" },
        { key: "peak", title: "predicted peak", kind: "bytes" },
        { key: "time", title: "time", kind: "ms" },
        { key: "extra", title: "extra time", kind: "number", cell: (value) => `+${(100 * value).toFixed(1)} %` },
      ],
      rows,
      page: 100,
    });
  }

  operations() {
    const { forward, measuredOperations } = this.data, dash = (value) => (value > 0 ? formatMs(value) : "–");
    const rows = forward.name.map((name, index) => ({
      name, index,
      order: index + 1,
      function: this.text(forward.function[index]),
      module: this.text(forward.module[index]),
      source: this.text(forward.source[index]),
      arguments: forward.arguments[index],
      time: forward.time[index],
      backward: forward.backward[index],
      measured: measuredOperations ? measuredOperations.forward[index] : 0,
      measuredBackward: measuredOperations ? measuredOperations.backward[index] : 0,
      bytes: forward.bytes[index],
      computed: forward.computed[index],
      decision: forward.computed[index] > 1 ? "recomputed" : "once",
    }));
    const shown = (value, row) => this.link(value, () => this.showOperation(row.index));
    new Table(this.at("operations"), {
      caption: "operations",
      columns: [
        { key: "name", title: "operation", kind: "text", cell: shown },
        { key: "order", title: "order", kind: "number" },
        { key: "function", title: "applies", kind: "text", path: true },
        { key: "module", title: "module", kind: "text", path: true },
        { key: "source", title: "source", kind: "text" },
        { key: "computed", title: "computed", kind: "number", cell: (value) => `${value}×` },
        { key: "time", title: "time", kind: "ms" },
        ...(measuredOperations ? [{ key: "measured", title: "measured", kind: "ms", cell: dash }] : []),
        { key: "backward", title: "backward", kind: "ms", cell: dash },
        ...(measuredOperations ? [{ key: "measuredBackward", title: "measured", kind: "ms", cell: dash }] : []),
        { key: "bytes", title: "makes", kind: "bytes" },
        { key: "arguments", title: "arguments", kind: "text", wide: true },
      ],
      rows,
      filter: { title: "computed", key: "decision", values: ["once", "recomputed"] },
    });
  }

  tensors() {
    const { tensors, forward } = this.data;
    const rows = tensors.name.map((name, index) => ({
      name, index,
      bytes: tensors.bytes[index],
      text: this.text(tensors.text[index]),
      decision: this.text(tensors.decision[index]),
      recomputed: tensors.recomputed[index],
      module: this.text(forward.module[tensors.producer[index]]),
      source: this.text(forward.source[tensors.producer[index]]),
      why: this.text(tensors.why[index]),
    }));
    const dot = (value) => element("span", { class: `decision ${value.replaceAll(" ", "-")}` }, value);
    const shown = (value, row) => this.link(value, () => this.showTensor(row.index));
    new Table(this.at("tensors"), {
      caption: "tensors",
      columns: [
        { key: "name", title: "tensor", kind: "text", cell: shown },
        { key: "bytes", title: "bytes", kind: "bytes" },
        { key: "text", title: "type and shape", kind: "text", path: true },
        { key: "decision", title: "is", kind: "text", cell: dot },
        { key: "recomputed", title: "recomputed", kind: "number", cell: (value) => (value ? `${value}×` : "–") },
        { key: "module", title: "module", kind: "text", path: true },
        { key: "source", title: "source", kind: "text" },
        { key: "why", title: "why", kind: "text", wide: true },
      ],
      rows,
      sort: { key: "bytes", down: true },
      filter: { title: "is", key: "decision", values: [...new Set(rows.map((row) => row.decision))].sort() },
    });
  }
}

new Page(JSON.parse(document.getElementById("report-data").textContent));
