// Curves: draws the values of a figure (`data-chart`, see elements.py) with uPlot in place of the server's drawing.
// Dragging zooms, a double click or Escape shows everything again; one control smooths all curves of the page.
"use strict";

{
  const page = document.getElementById("main");
  const states = new Map(); // title of a chart -> its zoom and hidden lines, which outlive a live update
  let plots = [];
  let smoothing = Number(sessionStorage.getItem("smoothing")) || 0;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const format = (value) => String(Number(value.toPrecision(4)));

  function make(tag, properties, ...content) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...content);
    return element;
  }

  // Exponential moving average without the bias of its start: weight 0.5, values 1 and 2 -> 1 and (0.25 + 1) / 0.75.
  function smooth(points) {
    let [sum, weight] = [0, 0];
    return points.map(([, value]) => {
      if (value === null) {
        return null;
      }
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
  }

  // One column of epochs, and a value, a low and a high column for each line: null is a gap, undefined no point.
  function align(lines) {
    const epochs = [...new Set(lines.flatMap((line) => line.points.map(([epoch]) => epoch)))].sort((a, b) => a - b);
    const places = new Map(epochs.map((epoch, place) => [epoch, place]));
    const columns = lines.flatMap(({ points }) =>
      [smooth(points), points.map((point) => point[2]), points.map((point) => point[3])].map((values) => {
        const column = new Array(epochs.length).fill(undefined);
        points.forEach(([epoch], number) => (column[places.get(epoch)] = values[number]));
        return column;
      }),
    );
    return [epochs, ...columns];
  }

  // Below the curves: intervals as bands or whiskers, and what was smoothed.
  function drawBelow(plot, lines) {
    const { ctx, bbox } = plot;
    const at = (epoch, value) => [plot.valToPos(epoch, "x", true), plot.valToPos(value, "y", true)];
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const { style, isBand, points } of lines.filter((line, number) => plot.series[3 * number + 1].show)) {
      const [area, strokes] = [new Path2D(), new Path2D()];
      points.forEach(([epoch, value, low, high], place) => {
        const [before, last, lastLow, lastHigh] = points[place - 1] || [];
        if (low !== undefined && !isBand) {
          strokes.moveTo(...at(epoch, low));
          strokes.lineTo(...at(epoch, high));
        } else if (low !== undefined && lastLow !== undefined) {
          area.moveTo(...at(before, lastLow));
          [at(before, lastHigh), at(epoch, high), at(epoch, low)].forEach((corner) => area.lineTo(...corner));
        }
        if (smoothing && Number.isFinite(value) && Number.isFinite(last)) {
          strokes.moveTo(...at(before, last));
          strokes.lineTo(...at(epoch, value));
        }
      });
      ctx.fillStyle = ctx.strokeStyle = color(style);
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.globalAlpha = 0.15;
      ctx.fill(area);
      ctx.globalAlpha = 0.4;
      ctx.stroke(strokes);
    }
    ctx.restore();
  }

  function buildOptions(figure, lines, state) {
    const font = `${getComputedStyle(document.body).fontSize} system-ui, sans-serif`;
    const grid = { stroke: () => color("rule"), width: 1 };
    const axis = { stroke: () => color("quiet"), font, grid, ticks: { show: false } };
    const name = (epoch) => (epoch === -1 ? "base" : String(epoch));
    const series = lines.flatMap(({ name: label, style }) => {
      const show = !state.hidden.has(label);
      const bound = { show, paths: () => null, points: { show: false } };
      const dash = style === "kept" ? [5, 4] : undefined;
      return [{ show, label, stroke: () => color(style), width: 2, dash, points: { size: 6 } }, bound, bound];
    });
    return {
      width: figure.clientWidth,
      height: figure.clientWidth < 480 ? 190 : 310,
      legend: { show: false },
      cursor: { sync: { key: "epochs" }, points: { show: false }, y: false },
      scales: { x: { time: false } },
      axes: [
        { ...axis, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], values: (plot, at) => at.map(name) },
        { ...axis, size: 60, values: (plot, at) => at.map(format) },
      ],
      series: [{}, ...series],
    };
  }

  function draw(figure) {
    const lines = JSON.parse(figure.dataset.chart);
    const svg = figure.querySelector("svg.chart");
    if (!lines.length) {
      return;
    }
    const part = [...page.children].find((each) => each.contains(figure));
    part.source = part.source || part.outerHTML; // what view.js compares with the server's page
    const title = svg.getAttribute("aria-label");
    const state = states.get(title) || { hidden: new Set(), zoom: null };
    states.set(title, state);
    const help = "Arrow keys read values, plus and minus zoom, Escape shows all epochs.";
    const box = make("div", { className: "plot", tabIndex: 0, role: "img", ariaLabel: `${title}. ${help}` });
    const reset = make("button", { type: "button", className: "reset", hidden: true }, "Show all epochs");
    const outputs = lines.map(() => make("output", {}));
    const place = make("output", {});
    svg.replaceWith(box);
    figure.querySelector("ul.legend")?.remove();
    const options = buildOptions(figure, lines, state);
    options.hooks = {
      drawAxes: [(plot) => drawBelow(plot, lines)],
      setCursor: [(plot) => tell(plot, lines, place, outputs)],
      setScale: [
        (plot, key) => {
          const { min, max } = plot.scales[key];
          if (key === "x") {
            state.zoom = min > plot.data[0][0] || max < plot.data[0].at(-1) ? [min, max] : null;
            reset.hidden = !state.zoom;
          }
        },
      ],
    };
    const zoom = state.zoom;
    const plot = new uPlot(options, align(lines), box);
    if (zoom) {
      zoomTo(plot, ...zoom);
    }
    const names = lines.map((line, number) => (lines.length > 1 ? buildSwitch(plot, line, number, state) : ""));
    const items = lines.map((line, number) => make("li", {}, names[number], outputs[number]));
    figure.append(make("ul", { className: "legend" }, ...items, make("li", {}, place), make("li", {}, reset)));
    reset.addEventListener("click", () => zoomTo(plot, -Infinity, Infinity));
    box.addEventListener("keydown", (event) => steer(event, plot));
    box.addEventListener("mousedown", (event) => event.preventDefault()); // a part with the focus is not updated
    const resize = () => figure.clientWidth && plot.setSize({ width: figure.clientWidth, height: plot.height });
    new ResizeObserver(resize).observe(figure);
    plots.push({ figure, plot, lines });
  }

  function zoomTo(plot, low, high) {
    plot.setScale("x", { min: Math.max(plot.data[0][0], low), max: Math.min(plot.data[0].at(-1), high) });
  }

  // A button of the legend switches its line off and on.
  function buildSwitch(plot, { name, style }, number, state) {
    const button = make("button", { type: "button" }, make("span", { className: `key ${style}` }), name);
    button.ariaPressed = String(!state.hidden.has(name));
    button.addEventListener("click", (event) => {
      if (event.detail) {
        button.blur(); // it was a mouse
      }
      const show = state.hidden.delete(name) || !state.hidden.add(name);
      button.ariaPressed = String(show);
      [1, 2, 3].forEach((place) => plot.setSeries(3 * number + place, { show }));
    });
    return button;
  }

  // Writes the values at the cursor into the legend.
  function tell(plot, lines, place, outputs) {
    const epoch = plot.data[0][plot.cursor.idx];
    place.textContent = epoch === undefined ? "" : epoch === -1 ? "base model" : `epoch ${epoch}`;
    lines.forEach(({ points }, number) => {
      const [, value, ...bounds] = points.find((point) => point[0] === epoch) || [];
      const interval = bounds.length ? ` [${bounds.map(format).join(", ")}]` : "";
      outputs[number].textContent = Number.isFinite(value) ? format(value) + interval : "";
    });
  }

  function steer(event, plot) {
    const [epochs] = plot.data;
    const { min, max } = plot.scales.x;
    const [first, last] = [epochs.findIndex((each) => each >= min), epochs.findLastIndex((each) => each <= max)];
    const place = plot.cursor.idx ?? first - 1;
    const move = (to) => {
      const epoch = epochs[Math.max(first, Math.min(last, to))];
      plot.setCursor({ left: plot.valToPos(epoch, "x"), top: 1 });
    };
    const zoom = (factor) => {
      const [middle, half] = [epochs[plot.cursor.idx] ?? (min + max) / 2, Math.max(0.5, ((max - min) * factor) / 2)];
      zoomTo(plot, middle - half, middle + half);
    };
    const actions = {
      ArrowLeft: () => move(place - 1),
      ArrowRight: () => move(place + 1),
      "+": () => zoom(0.5),
      "-": () => zoom(2),
      Escape: () => zoomTo(plot, -Infinity, Infinity),
    };
    if (actions[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      actions[event.key]();
    }
  }

  function drawAll() {
    plots = plots.filter(({ figure, plot }) => figure.isConnected || plot.destroy());
    const drawn = plots.map(({ figure }) => figure);
    [...page.querySelectorAll("figure[data-chart]")].filter((figure) => !drawn.includes(figure)).forEach(draw);
  }

  const slider = make("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: String(smoothing) });
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    sessionStorage.setItem("smoothing", slider.value);
    for (const { plot, lines } of plots) {
      const { min, max } = plot.scales.x;
      plot.setData(align(lines), false);
      zoomTo(plot, min, max);
    }
  });
  document.querySelector("header nav").after(make("label", { className: "smoothing" }, "Smooth curves", slider));
  const redraw = () => plots.forEach(({ plot }) => plot.redraw(false, true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("refreshed", drawAll);
  drawAll();
}
