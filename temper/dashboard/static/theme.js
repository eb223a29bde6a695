// Runs before the first paint, so that a chosen theme never flashes in the other one.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("temper-theme");
  } catch {
    /* storage may be forbidden: then the system decides */
  }
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = chosen === "dark" || chosen === "light" ? chosen : system;
})();
