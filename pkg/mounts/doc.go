// Package mounts turns a workspace into a mount plan, applies it inside a container's mount namespace by
// descriptor, and reads back what is mounted.
//
// Deciding (New, Plan) is pure; doing (Open, Apply) needs the kernel and CAP_SYS_ADMIN. It keeps promise P11.
package mounts
