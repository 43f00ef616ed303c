// Small values that the browser keeps. A browser may refuse: then nothing is kept, and nothing breaks.
export const KEY = "sightline.key"; // in sessionStorage only: it goes with the tab

export function stored(area, key) {
  try { return window[area].getItem(key); } catch { return null; }
}

export function store(area, key, value) {
  try {
    if (value === null) window[area].removeItem(key); else window[area].setItem(key, value);
    return true;
  } catch { return false; }
}
