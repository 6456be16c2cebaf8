package main

import (
	"fmt"
	"io"
)

// aim is what the product wants to reach. A missed one is printed; it fails nothing, because time is the machine's.
type aim struct {
	What     string  `json:"what"`
	Limit    float64 `json:"limit"`
	Unit     string  `json:"unit"`
	Value    float64 `json:"value"`
	Measured bool    `json:"measured"`
	OK       bool    `json:"ok"`
}

func (r *report) judge() {
	r.addRatio(nameExec, nameFloor, 1.6)
	r.addRatio(nameExec, "runc exec", 0.35)
	r.addRatio(nameStart, "runc run", 1.2)
	r.addRatio(nameTrueIsolated, nameTrueShared, 1.1)
	r.addRatio(nameListed, nameNoNetwork, 1.05)
	r.addMedian(nameCreateRefs, 1000)
	r.addMedian(nameCreatePack, 1000)
	if r.Memory != nil {
		r.add("receiptd and a waiting pid1, fresh", "MiB PSS", 12, mebibytes(totalPSS(r.Memory.Fresh)))
		r.add(fmt.Sprintf("the same after %d execs and %s", execsBefore, idle), "MiB PSS", 12, mebibytes(totalPSS(r.Memory.Used)))
	}
	limits := map[string]float64{"pid1": 2.5, "receiptd": 8}
	for _, s := range r.Sizes {
		if limit, ok := limits[s.Name]; ok {
			r.add(s.Name+" on disk", "MB", limit, megabytes(s.Bytes))
		}
	}
}

func (r *report) add(what, unit string, limit, value float64) {
	r.Aims = append(r.Aims, aim{What: what, Unit: unit, Limit: limit, Value: value, Measured: true, OK: value <= limit})
}

func (r *report) addRatio(name, base string, limit float64) {
	for _, s := range r.Latency {
		if ratio, ok := s.Ratios[base]; ok && s.Name == name {
			r.add(name, "× "+base, limit, ratio)
			return
		}
	}
	r.Aims = append(r.Aims, aim{What: name, Unit: "× " + base, Limit: limit})
}

func (r *report) addMedian(name string, limit float64) {
	for _, s := range r.Latency {
		if s.Name == name && s.Samples > 0 {
			r.add(name, "ms", limit, s.Median)
			return
		}
	}
	r.Aims = append(r.Aims, aim{What: name, Unit: "ms", Limit: limit})
}

func (r *report) writeAims(w io.Writer) {
	t := table(w)
	fmt.Fprintf(t, "\naim\tat most\tmeasured\t\n")
	for _, a := range r.Aims {
		value, verdict := fmt.Sprintf("%.2f", a.Value), "ok"
		switch {
		case !a.Measured:
			value, verdict = "-", "not measured"
		case !a.OK:
			verdict = "missed"
		}
		fmt.Fprintf(t, "%s\t%.2f %s\t%s\t%s\n", a.What, a.Limit, a.Unit, value, verdict)
	}
	t.Flush()
}
