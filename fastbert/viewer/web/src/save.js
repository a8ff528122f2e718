// Saving the picture of a view as SVG or PNG, without any request.

import { themed, vector } from './dom.js';

// Returns an SVG document of a picture: its size and nodes.
export function svgText({ width, height, nodes }) {
  const style = `text{font-family:system-ui,sans-serif;fill:${themed('--text')}}`;
  const root = vector('svg', { xmlns: 'http://www.w3.org/2000/svg', width, height, viewBox: `0 0 ${width} ${height}` },
    vector('style', {}, style),
    vector('rect', { width, height, fill: themed('--background') }),
    nodes);
  return new XMLSerializer().serializeToString(root);
}

function download(blob, name) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function saveSvg(picture, name) {
  download(new Blob([svgText(picture)], { type: 'image/svg+xml' }), `${name}.svg`);
}

export async function savePng(picture, name) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([svgText(picture)], { type: 'image/svg+xml' }));
  await image.decode();
  const canvas = document.createElement('canvas');
  // Browsers limit the sides of a canvas.
  const scale = Math.min(2, 8000 / Math.max(picture.width, picture.height));
  canvas.width = picture.width * scale;
  canvas.height = picture.height * scale;
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
  download(blob, `${name}.png`);
}
