"use strict";
// Lines and points by uPlot, in the colours of the theme; drawn anew when it or the width changes.
heddle.charts = (() => {
  const { el, css } = heddle;
  function options(chart, width) {
    const axis = (label, size) => ({
      label, size, labelSize: 22, stroke: css("--text"), font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif", grid: { stroke: css("--line"), width: 0.5 },
      ticks: { stroke: css("--line"), size: 5 },
    });
    // Shares and rates begin at nothing; clouds of points have room around them.
    const fromZero = (_, low, high) => [0, Math.max(high, 1e-9) * 1.08];
    const around = (_, low, high) => {
      const room = Math.max((high - low) * 0.12, high * 0.02, 1e-9);
      return [Math.max(low - room, 0), high + room];
    };
    const range = chart.points ? around : fromZero;
    return {
      width, height: 250, legend: { show: chart.series.length > 1, live: false },
      scales: { x: { time: false, range: chart.points ? around : undefined }, y: { range } },
      axes: [{ ...axis(chart.x, 34), space: 70 }, axis(chart.y, 58)],
      series: [{ label: chart.x }, ...chart.series.map((s) => ({
        label: s.label, stroke: css(s.color), width: 2, spanGaps: !chart.points,
        paths: chart.points ? () => null : undefined,
        points: chart.points
          ? { show: true, size: s.size || 9, fill: s.isOpen ? css("--back") : css(s.color), width: 2 }
          : { show: false },
      }))],
    };
  }
  // What a line says, in words, for those who do not see it.
  function words(chart) {
    return chart.series.map((s, i) => {
      const known = chart.data[i + 1].filter((n) => n !== null);
      if (!known.length) return `${s.label}: nothing`;
      const least = Math.min(...known), most = Math.max(...known);
      const last = chart.points ? "" : `, at the end ${known[known.length - 1].toPrecision(3)}`;
      return `${s.label}: ${least.toPrecision(3)} to ${most.toPrecision(3)}${last}`;
    }).join("; ");
  }
  // `chart`: {id, title, x, y, points, series[{label, color, size, isOpen}], data}. Axes are named
  // by their label. Returns the element, whose `take(data)` draws other data.
  function add(chart) {
    const box = el("div", { class: "plot", role: "img" });
    let plot = null;
    const name = () => box.setAttribute("aria-label",
      `${chart.title}: ${chart.y} over ${chart.x}. ${words(chart)}`);
    name();
    heddle.fit(box, (width) => {
      if (plot) plot.destroy();
      plot = new uPlot(options(chart, width), chart.data, box);
    });
    const whole = el("figure", { class: "chart", id: chart.id },
      el("figcaption", {}, chart.title), box);
    whole.take = (data) => {
      chart.data = data;
      name();
      if (plot) plot.setData(data);
    };
    return whole;
  }
  return { add };
})();
