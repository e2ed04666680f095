// This file draws the panels.

package main

import (
	"bytes"
	"context"
	"encoding/xml"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/prometheus/promql"

	dashboard "github.com/holdfast-dev/holdfast/test/prometheus"
)

// The measures of the picture. A row of Grafana's grid has 24 columns.
const (
	column, row  = 50, 30
	gap          = 8
	left, right  = 48, 12
	top, bottom  = 30, 46
	head         = 44
	maxInLegend  = 4
	longestName  = 34
	gridColumns  = 24
	legendLetter = 5.6
)

var colours = []string{"#3274d9", "#e0752d", "#56a64b", "#e02f44", "#a352cc", "#f2cc0c", "#1fa3a3", "#8f6b4e"}

// canvas is an SVG in the making.
type canvas struct{ bytes.Buffer }

func (c *canvas) add(format string, args ...any) {
	_, _ = fmt.Fprintf(&c.Buffer, format+"\n", args...) // a Buffer takes all
}

func (c *canvas) text(x, y float64, class, text string) {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(text)) // a Buffer takes all
	c.add(`<text x="%.1f" y="%.1f" class="%s">%s</text>`, x, y, class, b.String())
}

func draw(ctx context.Context, m *dashboard.Memory, d dashboard.Dashboard, from, to time.Time, step, over time.Duration) ([]byte, error) {
	height := 0
	for _, p := range d.Panels {
		height = max(height, p.GridPos.Y+p.GridPos.H)
	}
	c := &canvas{}
	w, h := gridColumns*column, height*row+head
	c.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`, w, h)
	c.add(`<style>.t{font-size:13px;font-weight:600;fill:#1f2328}.a{fill:#59636e;font-size:10px}.r{text-anchor:end}.m{text-anchor:middle}.h{font-size:18px;font-weight:600;fill:#1f2328}</style>`)
	c.add(`<rect width="%d" height="%d" fill="#f4f5f5"/>`, w, h)
	c.text(gap, 28, "h", d.Title)
	c.text(float64(w-gap), 28, "a r", fmt.Sprintf("%s of a run on one machine, rates over %s", to.Sub(from).Round(time.Second), over))
	for _, p := range d.Panels {
		if err := panel(ctx, c, m, p, from, to, step, over); err != nil {
			return nil, fmt.Errorf("panel %q: %w", p.Title, err)
		}
	}
	c.add("</svg>")
	return c.Bytes(), nil
}

// line is one series of a panel.
type line struct {
	name   string
	points []promql.FPoint
}

func panel(ctx context.Context, c *canvas, m *dashboard.Memory, p dashboard.Panel, from, to time.Time, step, over time.Duration) error {
	var lines []line
	highest := 0.0
	for _, target := range p.Targets {
		result, err := m.Range(ctx, dashboard.Query(target.Expr, over), from, to, step)
		if err != nil {
			return err
		}
		for _, s := range result {
			l := line{name: target.LegendFormat}
			for name, value := range s.Metric.Map() {
				l.name = strings.ReplaceAll(l.name, "{{"+name+"}}", value)
			}
			for strings.Contains(l.name, "{{") { // a label that is empty
				before, rest, _ := strings.Cut(l.name, "{{")
				_, after, _ := strings.Cut(rest, "}}")
				l.name = strings.TrimSpace(before + after)
			}
			for _, f := range s.Floats {
				if !math.IsNaN(f.F) && !math.IsInf(f.F, 0) {
					l.points = append(l.points, f)
					highest = max(highest, f.F)
				}
			}
			lines = append(lines, l)
		}
	}
	x0, y0 := float64(p.GridPos.X*column+gap/2), float64(p.GridPos.Y*row+head)
	w, h := float64(p.GridPos.W*column-gap), float64(p.GridPos.H*row-gap)
	c.add(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" rx="3" fill="#fff" stroke="#d8dde3"/>`, x0, y0, w, h)
	c.text(x0+10, y0+19, "t", p.Title)
	px, py, pw, ph := x0+left, y0+top, w-left-right, h-top-bottom
	limit := nice(highest)
	for i := range 3 {
		v := limit * float64(i) / 2
		y := py + ph - ph*float64(i)/2
		c.add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#e6e9ec"/>`, px, y, px+pw, y)
		c.text(px-5, y+3.5, "a r", number(v, p.FieldConfig.Defaults.Unit))
	}
	all := to.Sub(from)
	for i := range 4 {
		part := all * time.Duration(i) / 3
		c.text(px+pw*float64(i)/3, py+ph+14, "a m", fmt.Sprintf("%d:%02d", int(part.Minutes()), int(part.Seconds())%60))
	}
	if len(lines) == 0 {
		c.text(px+pw/2, py+ph/2, "a m", "none")
	}
	lx := x0 + 12
	for i, l := range lines {
		colour := colours[i%len(colours)]
		var path strings.Builder
		last := int64(0)
		for _, f := range l.points {
			pen := "L"
			if last == 0 || time.Duration(f.T-last)*time.Millisecond > 2*step {
				pen = "M" // there was nothing in between
			}
			last = f.T
			x := px + pw*float64(f.T-from.UnixMilli())/float64(all.Milliseconds())
			_, _ = fmt.Fprintf(&path, "%s%.1f %.1f", pen, x, py+ph-ph*f.F/limit) // a Builder takes all
		}
		if path.Len() > 0 {
			c.add(`<path d="%s" fill="none" stroke="%s" stroke-width="1.5"/>`, path.String(), colour)
		}
		if i >= maxInLegend {
			continue
		}
		name := []rune(l.name)
		if len(name) > longestName {
			name = append(name[:longestName-1], '…')
		}
		room := legendLetter * float64(len(name))
		if lx+room+18 > x0+w && i > 0 {
			continue
		}
		c.add(`<rect x="%.1f" y="%.1f" width="9" height="3" fill="%s"/>`, lx, y0+h-13, colour)
		c.text(lx+12, y0+h-9, "a", string(name))
		lx += room + 22
	}
	return nil
}

// nice is the next number above that is easy to read.
func nice(v float64) float64 {
	if v <= 0 {
		return 1
	}
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, f := range []float64{1, 2, 4, 5, 10} {
		if v <= f*unit {
			return f * unit
		}
	}
	return 10 * unit
}

// number writes a value in the panel's unit.
func number(v float64, unit string) string {
	short := func(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) }
	switch {
	case v == 0:
		return "0"
	case unit == "percentunit":
		return short(v*100) + " %"
	case unit == "s" && v < 1:
		return short(v*1000) + " ms"
	case unit == "s":
		return short(v) + " s"
	case unit == "reqps" || unit == "ops":
		return short(v) + "/s"
	}
	return short(v)
}
