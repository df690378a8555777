// The gradient error of the schedule that is shown, from a small network that is really trained.
"use strict";

const MOST_OPERATIONS = 4000;

// What trainAlong gives, or {reason}; null when it is switched off.
function train(run, chosen) {
  if (!chosen.gradients || !run.timeline) return null;
  const { schedule } = run.timeline;
  if (schedule.chains.length > 1) return { reason: "two copies of the model are simulated only." };
  if (chosen.recompute && !run.policy.stashed) {
    return { reason: "with recomputation the forward pass would be made anew at newer weights." };
  }
  if (schedule.ops().length > MOST_OPERATIONS) {
    return { reason: "too many operations; take fewer ranks, microbatches or batches." };
  }
  return trainAlong(run.timeline, run.policy, run.use, run.batchSize, Number(chosen.rate));
}

function showTrained(trained, chosen) {
  byId("trained").hidden = !chosen.gradients;
  if (!trained) return;
  if (trained.reason) {
    byId("trained-text").textContent = `Not trained: ${trained.reason}`;
    byId("trained-table").replaceChildren();
    return;
  }
  const { whole, newest, perStage, losses } = trained;
  byId("trained-text").textContent = verdict(whole, newest) + lossText(losses);
  const errors = perStage.map((error, stage) => [`stage ${stage}`, error]);
  const rows = [["all stages", whole], ...errors, ["all, against the newest", newest]];
  const most = Math.max(...rows.map(([, error]) => (Number.isFinite(error) ? error : 0)), 1e-9);
  byId("trained-table").replaceChildren(...rows.map(([name, error]) => bar(name, error, most)));
}

function verdict(whole, newest) {
  if (whole) return `Wrong by ${percent(whole)}: backward passes see other weights than forward passes saw. `;
  if (newest) return "Valid: the exact gradient of the weights that the forward passes saw, though not of the newest. ";
  return "Exact: the gradient of the newest weights. ";
}

function lossText(losses) {
  const few = Math.max(1, Math.floor(losses.length / 4));
  const mean = (part) => (part.reduce((a, b) => a + b, 0) / part.length).toFixed(2);
  return `Loss ${mean(losses.slice(0, few))} at first, ${mean(losses.slice(-few))} in the end.`;
}

function bar(name, error, most) {
  const shown = Number.isFinite(error) ? error / most : 1;
  const filled = el("span", { className: "filled" });
  filled.style.width = `${Math.min(100, 100 * shown)}%`;
  const value = error === 0 ? "0" : Number.isFinite(error) ? percent(error) : "diverged";
  return el(
    "div", { className: "bar" }, el("span", {}, name),
    el("span", { className: "rail" }, filled), el("span", {}, value),
  );
}
