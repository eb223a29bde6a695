// How tokens are spread over experts. Owns: the map of layers by experts, and the step that it shows.
import { ofRun } from "./api.js";
import { Chart } from "./charts.js";
import { el, fill } from "./dom.js";

export class ExpertLoads {
  constructor() {
    this.chart = new Chart("Load of experts", "Tokens of each expert at each layer, over the mean of the layer.", {
      height: 280,
      x: "expert",
      y: "layer",
      hasLog: false,
    });
    this.node = this.chart.node;
    this.node.hidden = true; // most models have no experts
    this.shown = el("span", { class: "latest" });
    this.slider = el("input", { type: "range", min: 0, "aria-label": "Step of the load of experts" });
    this.slider.addEventListener("change", () => this.show(this.steps[Number(this.slider.value)]));
    this.node.append(el("label", { class: "hint" }, "Step ", this.slider, this.shown));
    this.steps = [];
  }

  /** The last step, or the one that the reader chose. */
  async load(run, isCurrent) {
    this.run = run;
    this.isCurrent = isCurrent;
    const isLast = Number(this.slider.value) >= this.steps.length - 1;
    const chosen = this.steps[Number(this.slider.value)];
    await this.show(isLast ? null : chosen);
  }

  async show(step) {
    const found = await ofRun(this.run.id, "experts", step ? { stage: step[0], step: step[1] } : {});
    if (!this.isCurrent()) return;
    this.steps = found.steps;
    this.node.hidden = !this.steps.length;
    if (this.node.hidden) {
      this.chart.set([], {}, "Appears with the first step of a model with experts.");
      return;
    }
    this.slider.max = this.steps.length - 1;
    this.slider.value = this.steps.findIndex(([stage, number]) => stage === found.stage && number === found.step);
    fill(this.shown, `${found.step} of stage ${found.stage + 1}`);
    const trace = {
      type: "heatmap",
      name: "tokens over the mean",
      z: found.loads,
      y: found.layers.map(String),
      customdata: found.tokens,
      colorscale: "Viridis",
      zmin: 0,
      zmax: Math.max(2, ...found.loads.flat()),
      hovertemplate: "layer %{y}, expert %{x}: %{z:.2f} of the mean, %{customdata} tokens<extra></extra>",
    };
    this.chart.set([trace], { hovermode: "closest", yaxis: { type: "category" }, xaxis: { dtick: null } });
  }
}
