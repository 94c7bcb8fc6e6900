// A canvas with light ink on a dark ground. Its value is a PNG as a data URL, "" when it is empty.
// Strokes stay in a list, so that a canvas that the page has made anew can be painted again.
let strokes = [];
let drawing = false;
const canvas = () => element.querySelector('canvas');
const paint = () => {
  const pen = canvas().getContext('2d');
  pen.clearRect(0, 0, 280, 280);
  pen.strokeStyle = '#fff';
  pen.lineWidth = 20;
  pen.lineCap = pen.lineJoin = 'round';
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
const finish = () => {
  if (drawing) props.value = canvas().toDataURL('image/png');
  drawing = false;
};
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
element.addEventListener('pointerup', finish);
element.addEventListener('pointercancel', finish);
element.addEventListener('click', (event) => {
  if (event.target.tagName !== 'BUTTON') return;
  strokes = [];
  paint();
  props.value = '';
});
watch('value', paint);
