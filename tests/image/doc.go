// Package image builds the project's two images as "make image" does, and looks at them from outside: that two builds are the
// same to the byte, that a real containerd takes them and a sandbox lives on one, what is in them, and what they say of
// themselves.
package image
