// Light or dark: as the system is, until the reader chooses. Loaded before the first paint, so it is not a module.
"use strict";
(() => {
  const CHOICE = "sightline.theme";
  const root = document.documentElement;
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try { return localStorage.getItem(CHOICE); } catch { return null; }
  }
  function choose(theme) {
    try {
      if (theme === null) localStorage.removeItem(CHOICE); else localStorage.setItem(CHOICE, theme);
      return true;
    } catch { return false; }
  }
  function show(theme) {
    root.dataset.theme = theme;
    document.querySelector("meta[name=theme-color]").content = theme === "dark" ? "#181d1c" : "#ffffff";
  }
  function apply() {
    const theme = chosen();
    show(theme === "dark" || theme === "light" ? theme : systemIsDark.matches ? "dark" : "light");
  }
  function toggle() {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    // Choosing what the system has is to follow it again.
    choose((next === "dark") === systemIsDark.matches ? null : next);
    show(next);
  }
  apply();
  systemIsDark.addEventListener("change", apply);
  window.addEventListener("storage", (event) => { if (event.key === CHOICE) apply(); });
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", toggle);
  });
})();
