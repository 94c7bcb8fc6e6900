"""A canvas to draw on: light ink on a dark ground, as MNIST has it. Its value is a PNG as a data address."""

from __future__ import annotations

HTML = """
<canvas width="280" height="280" role="img" aria-label="a canvas to draw a digit on"></canvas>
<button type="button">Clear the canvas</button>
"""

CSS = """
canvas { width: 100%; max-width: 280px; aspect-ratio: 1; background: #000; border-radius: 8px; display: block;
  touch-action: none; cursor: crosshair; border: 1px solid var(--border-color-primary); }
button { margin-top: .5rem; }
"""

# Strokes stay in a list, so that a canvas that the page has made anew can be painted again.
JS = """
let strokes = [];
const canvas = () => element.querySelector('canvas');
const paint = () => {
  const pen = canvas().getContext('2d');
  pen.clearRect(0, 0, 280, 280);
  pen.strokeStyle = '#fff'; pen.lineWidth = 20; pen.lineCap = pen.lineJoin = 'round';
  for (const stroke of strokes) {
    pen.beginPath();
    pen.moveTo(...stroke[0]);
    for (const point of stroke) pen.lineTo(...point);
    pen.stroke();
  }
};
const place = (event) => {
  const box = canvas().getBoundingClientRect();
  return [(event.clientX - box.left) * 280 / box.width, (event.clientY - box.top) * 280 / box.height];
};
let drawing = false;
element.addEventListener('pointerdown', (event) => {
  if (event.target !== canvas()) return;
  drawing = true;
  event.target.setPointerCapture(event.pointerId);
  strokes.push([place(event)]);
  paint();
});
element.addEventListener('pointermove', (event) => {
  if (!drawing) return;
  strokes[strokes.length - 1].push(place(event));
  paint();
});
const done = () => {
  if (!drawing) return;
  drawing = false;
  props.value = canvas().toDataURL('image/png');
};
element.addEventListener('pointerup', done);
element.addEventListener('pointercancel', done);
element.addEventListener('click', (event) => {
  if (event.target.tagName !== 'BUTTON') return;
  strokes = [];
  paint();
  props.value = '';
});
watch('value', paint);
"""
