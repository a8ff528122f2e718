// Colours that the colour-blind can tell apart: Okabe and Ito's for heads, cividis for numbers.

import { interpolateBlues, interpolateCividis, interpolatePuOr } from 'd3-scale-chromatic';

const OKABE_ITO = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#7a7a7a', '#b8a800'];

// Heads beyond the eighth repeat the colours with dashed lines.
export const headColour = (head) => OKABE_ITO[head % OKABE_ITO.length];
export const headDash = (head) => ['', '5 3', '1 3'][Math.floor(head / OKABE_ITO.length) % 3];

const STEPS = 256;
const rgb = (text) => {
  const hex = /^#(..)(..)(..)$/.exec(text);
  if (hex) return hex.slice(1).map((part) => Number.parseInt(part, 16));
  return text.match(/\d+/g).slice(0, 3).map(Number);
};
const ramp = (interpolate) => Array.from({ length: STEPS }, (_, i) => rgb(interpolate(i / (STEPS - 1))));
const CIVIDIS = ramp(interpolateCividis);
const BLUES = ramp(interpolateBlues);
const PUOR = ramp(interpolatePuOr);

// One number per pixel for ImageData, whose bytes are red, green, blue and opacity.
const pixel = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
export const HIDDEN = pixel([128, 128, 128]);
// Returns a pixel of a pair that a filter leaves out.
export const faint = (colour) => ((60 << 24) | (colour & 0xffffff)) >>> 0;

const index = (share) => Math.max(0, Math.min(STEPS - 1, Math.round(share * (STEPS - 1))));

const CIVIDIS_PIXELS = Uint32Array.from(CIVIDIS, (colour) => pixel(colour));
const PUOR_PIXELS = Uint32Array.from(PUOR, (colour) => pixel(colour));

// Pixels of shares from 0 to 1. The square root lets small weights be seen.
export const sequential = (share) => CIVIDIS_PIXELS[index(Math.sqrt(share))];
// For words: from the colour of the page to its contrast.
export const heat = (share, dark) => BLUES[index(dark ? 1 - Math.sqrt(share) : Math.sqrt(share))];
// Pixels of numbers from -1 (orange) to 1 (purple).
export const diverging = (value) => PUOR_PIXELS[index((1 - value) / 2)];
export const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

// Returns black or white, whichever has more contrast with a colour (WCAG 2.2).
export function ink([r, g, b]) {
  const linear = (part) => (part <= 10.31 ? part / 3294 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  return light > 0.179 ? '#000' : '#fff';
}
