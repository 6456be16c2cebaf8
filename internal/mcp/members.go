package mcp

import (
	"bytes"
	"encoding/json"
)

// head is what the connection itself reads of a message.
type head struct {
	id     json.RawMessage // as it was written; nil without one
	ids    int             // so many there are
	method bool
}

// examine reads a valid JSON text, names decoded as everybody after it does, and gives the first member that its object has
// twice: which of the two counts is for each reader to choose, and whoever looked at the message on its way may have chosen
// the other. The tool's arguments are left out: parseArguments says in words what is wrong with them.
func examine(text []byte) (h head, twice string) {
	d := json.NewDecoder(bytes.NewReader(text))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return h, ""
	}
	twice = eachMember(d, func(name string) string {
		switch name {
		case "id":
			h.ids++
			_ = d.Decode(&h.id) // the text is valid
			return ""
		case "params":
			return examineParams(d)
		case "method":
			h.method = true
		}
		return examineValue(d)
	})
	return h, twice
}

func examineParams(d *json.Decoder) string {
	t, _ := d.Token()
	if t != json.Delim('{') {
		return examineRest(d, t)
	}
	return eachMember(d, func(name string) string {
		if name == "arguments" {
			var skipped json.RawMessage
			_ = d.Decode(&skipped)
			return ""
		}
		return examineValue(d)
	})
}

func examineValue(d *json.Decoder) string {
	t, _ := d.Token()
	return examineRest(d, t)
}

// examineRest goes on with a value whose first token was read.
func examineRest(d *json.Decoder, first json.Token) (twice string) {
	switch first {
	case json.Delim('{'):
		return eachMember(d, func(string) string { return examineValue(d) })
	case json.Delim('['):
		for d.More() {
			if t := examineValue(d); twice == "" {
				twice = t
			}
		}
		_, _ = d.Token()
	}
	return twice
}

// eachMember goes through an object to its end. It gives the first name that is there twice, in it or deeper.
func eachMember(d *json.Decoder, value func(name string) (twice string)) (twice string) {
	seen := map[string]bool{}
	for d.More() {
		t, err := d.Token()
		name, _ := t.(string)
		if err != nil {
			return twice
		}
		again := seen[name]
		seen[name] = true
		inside := value(name)
		switch {
		case twice != "":
		case again:
			twice = name
		default:
			twice = inside
		}
	}
	_, _ = d.Token()
	return twice
}
