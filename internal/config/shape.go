package config

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandbox-agent/sandbox-agent/pkg/egress"
)

// shape checks what a file holds against the keys and kinds of Config, before it is decoded: an operator is told the
// key's path and what it takes, where the decoder would speak of Go types and leave the path out.
type shape struct {
	// allowed says what a key takes, as far as its kind doesn't say it.
	allowed map[string]string
}

func newShape(c *Config) shape {
	s := shape{allowed: map[string]string{
		"socket.mode": `four octal digits in quotes, for example "0660" (without quotes YAML reads a number of its own)`,
	}}
	for key, set := range map[string][]string{
		"workspace.hooks": hookModes, "workspace.git_layout": layouts, "log.level": levels, "runtime.default": runtimes, "network.default": networks, "network.egress.default": egress.Modes,
	} {
		s.allowed[key] = strings.Join(set, ", ") + " (YAML reads a bare on, off, yes or no as true or false: put it in quotes)"
	}
	for _, r := range c.ranges() {
		s.allowed[r.key] = r.text()
	}
	return s
}

// check looks at v, the value of key, for a field of type t. A key without a value keeps its default.
func (s shape) check(key string, v any, t reflect.Type) error {
	if v == nil {
		return nil
	}
	if t == reflect.TypeFor[Duration]() {
		return s.duration(key, v)
	}
	switch t.Kind() {
	case reflect.Struct:
		return s.section(key, v, t)
	case reflect.Slice:
		return s.list(key, v, t)
	case reflect.Map:
		return s.named(key, v, t)
	case reflect.String:
		if _, ok := v.(string); !ok {
			return s.refuse(key, v, "text; put it in quotes, if it is meant as text")
		}
	case reflect.Bool:
		if _, ok := v.(bool); !ok {
			return s.refuse(key, v, "true or false")
		}
	default:
		return s.number(key, v, t)
	}
	return nil
}

func (s shape) section(key string, v any, t reflect.Type) error {
	fields, names := map[string]reflect.Type{}, []string{}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		fields[name], names = f.Type, append(names, name)
	}
	whose := "the file"
	if key != "" {
		whose = key
	}
	m, ok := v.(map[string]any)
	if !ok {
		return bad(whose, v, "a section with the keys "+strings.Join(names, ", "))
	}
	for _, name := range sortedKeys(m) {
		path := name
		if key != "" {
			path = key + "." + name
		}
		f, known := fields[name]
		if !known {
			return fmt.Errorf("%w: %s is no key; the keys of %s are %s", ErrInvalid, path, whose, strings.Join(names, ", "))
		}
		if err := s.check(path, m[name], f); err != nil {
			return err
		}
	}
	return nil
}

func (s shape) list(key string, v any, t reflect.Type) error {
	l, ok := v.([]any)
	if !ok {
		return s.refuse(key, v, "a list, also for one thing: [x]")
	}
	for i, item := range l {
		path := fmt.Sprintf("%s[%d]", key, i)
		if item == nil {
			return bad(path, "", "no empty item")
		}
		if err := s.check(path, item, t.Elem()); err != nil {
			return err
		}
	}
	return nil
}

// named is a section whose keys are names that the operator chose.
func (s shape) named(key string, v any, t reflect.Type) error {
	m, ok := v.(map[string]any)
	if !ok {
		return bad(key, v, "a section with a name for each entry: {NAME: {…}}")
	}
	for _, name := range sortedKeys(m) {
		path := key + "." + name
		if m[name] == nil {
			return bad(path, "", "no empty entry")
		}
		if err := s.check(path, m[name], t.Elem()); err != nil {
			return err
		}
	}
	return nil
}

func (s shape) number(key string, v any, t reflect.Type) error {
	n, isNumber := v.(json.Number)
	whole := "a whole number"
	var err error
	switch t.Kind() {
	case reflect.Float64:
		whole = "a number"
		_, err = strconv.ParseFloat(n.String(), 64)
	case reflect.Uint32:
		whole = "a whole number from 0 to 4294967295"
		_, err = strconv.ParseUint(n.String(), 10, 32)
	default:
		_, err = strconv.ParseInt(n.String(), 10, t.Bits())
	}
	if !isNumber || err != nil {
		return s.refuse(key, v, whole)
	}
	return nil
}

func (s shape) duration(key string, v any) error {
	text, ok := v.(string)
	if ok {
		if _, err := time.ParseDuration(text); err == nil {
			return nil
		}
	}
	return bad(key, v, s.allowed[key]+`; write it with its unit, for example "90s" or "2m"`)
}

// refuse says what the key takes: its own rule, where it has one, else its kind's.
func (s shape) refuse(key string, v any, kind string) error {
	if own := s.allowed[key]; own != "" {
		kind = own
	}
	return bad(key, v, kind)
}

// show is a value as the operator wrote it, or near enough.
func show(v any) string {
	switch v := v.(type) {
	case string:
		return strconv.Quote(v)
	case map[string]any:
		return "a section"
	}
	if r := reflect.ValueOf(v); r.Kind() == reflect.Slice {
		if r.Len() == 0 {
			return "an empty list"
		}
		return "a list"
	}
	return fmt.Sprint(v)
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
