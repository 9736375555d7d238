"""The contrast of texts on a page."""

#: Of texts, WCAG 2.1 AA.
LEAST_CONTRAST = 4.5

#: The contrast of each text with what is behind it.
CONTRASTS = """(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
  };
  const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  return [...document.querySelectorAll('main *, header *, section *')]
    .filter((node) => node.checkVisibility() && hasText(node) && !node.classList.contains('none'))
    .map((node) => {
      const colour = getComputedStyle(node)[node.closest('svg') ? 'fill' : 'color'];
      const [a, b] = [light(parse(colour)), light(behind(node))].sort((a, b) => b - a);
      return [node.textContent, (a + 0.05) / (b + 0.05)];
    });
})()"""
