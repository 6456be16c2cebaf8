// Command journal measures what one durable 400-byte record costs in the libraries that the agent's journal could
// be built on. Each engine is a build of its own (tags pebble, bbolt, sqlite, zombiezen), so that its memory and its
// size are its own; run.sh builds and runs them all. It is a module of its own: the engines that lost are not in the
// product's.
package main

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// engine stores records durably: Put returns when the record is on disk, and may be called at the same time.
type engine interface {
	Put(key string, value []byte) error
	Close() error
}

const (
	records    = 2000
	valueBytes = 400
	// Between two commands of one session a journal rests; without a pause one measures the disk's queue.
	pause = time.Millisecond
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "journal:", err)
		os.Exit(1)
	}
}

func run() error {
	root := "/var/tmp"
	if len(os.Args) > 1 {
		root = os.Args[1]
	}
	dir, err := os.MkdirTemp(root, "sa-bench-journal-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	before := memory("VmRSS:")
	e, err := open(dir)
	if err != nil {
		return err
	}
	row := []string{fmt.Sprintf("%-10s", engineName)}
	for _, writers := range []int{1, 8} {
		times, whole, err := measure(e, writers)
		if err != nil {
			return err
		}
		row = append(row, fmt.Sprintf("%6.0f %6.0f %7.0f", micros(times[len(times)/2]), micros(times[len(times)*99/100]), float64(len(times))/whole.Seconds()))
	}
	row = append(row, fmt.Sprintf("%6.1f", float64(memory("VmRSS:")-before)/1024))
	fmt.Println(strings.Join(row, " | "))
	return e.Close()
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func measure(e engine, writers int) ([]time.Duration, time.Duration, error) {
	var mu sync.Mutex
	var all []time.Duration
	var failed error
	var wg sync.WaitGroup
	start := time.Now()
	for w := range writers {
		wg.Go(func() {
			times, err := writer(e, fmt.Sprintf("exec/%d/%d", writers, w), records/writers)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, times...)
			if err != nil {
				failed = err
			}
		})
	}
	wg.Wait()
	whole := time.Since(start)
	slices.Sort(all)
	return all, whole, failed
}

func writer(e engine, prefix string, n int) ([]time.Duration, error) {
	value := []byte(strings.Repeat("x", valueBytes))
	times := make([]time.Duration, 0, n)
	for i := range n {
		time.Sleep(pause)
		t := time.Now()
		if err := e.Put(fmt.Sprintf("%s/%08d", prefix, i), value); err != nil {
			return times, err
		}
		times = append(times, time.Since(t))
	}
	return times, nil
}

// memory is a field of /proc/self/status, KiB.
func memory(field string) int {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var name string
		var kib int
		if n, _ := fmt.Sscan(s.Text(), &name, &kib); n == 2 && name == field {
			return kib
		}
	}
	return 0
}
