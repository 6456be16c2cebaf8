package kata

import "slices"

// Advisory is a published fault of Kata that matters here: a way from a command to the node, or from a command to the
// guest's root. Faults by which a host attacks a confidential guest are not in the list: here the host is trusted.
type Advisory struct {
	ID, CVE string
	// Fixed is the first release without it.
	Fixed Version
	// Flavours and Hypervisors that have it; empty: all.
	Flavours    []Flavour
	Hypervisors []string
	What        string
}

// Advisories are those that were known on 2026-11-30, each checked at its source (docs/kata.md says where, and what
// could not be read). None is left out because nothing here passes an annotation: that is one line of defence, not two.
var Advisories = []Advisory{
	{
		ID: "GHSA-2gv2-cffp-j227", CVE: "CVE-2026-47243", Fixed: Version{3, 31, 0, ""}, Flavours: []Flavour{FlavourRust},
		What: "the guest's root makes links anywhere on the host through virtiofsd, which runs as root without its sandbox",
	},
	{
		ID: "GHSA-rr59-xxvx-96qr", CVE: "CVE-2026-44210", Fixed: Version{3, 31, 0, ""},
		What: "an annotation gives virtiofsd arguments, and with them the host's root folder to the guest",
	},
	{
		ID: "GHSA-mp2j-xm59-qfgw", CVE: "CVE-2026-50540", Fixed: Version{4, 0, 0, ""},
		What: "an annotation names any file of the host as the configuration, and so any program to run as root",
	},
	{
		ID: "GHSA-7fhf-v3p3-rp56", Fixed: Version{4, 0, 0, ""},
		What: "an annotation mounts any path of the host into the guest",
	},
	{
		// Published the day after 4.0.0, and the range could not be read: the next release is the first that is taken.
		ID: "GHSA-fgm4-mv68-h344", Fixed: Version{4, 1, 0, ""}, Flavours: []Flavour{FlavourRust}, Hypervisors: []string{"dragonball"},
		What: "Dragonball's block device does not check lengths that the guest gives: a way from the guest into the VMM",
	},
	{
		ID: "GHSA-wwj6-vghv-5p64", CVE: "CVE-2026-24834", Fixed: Version{3, 27, 0, ""}, Hypervisors: []string{"clh", "cloud-hypervisor"},
		What: "a container writes the guest's own image in memory, and becomes the guest's root, receiptd's included",
	},
	{
		ID: "GHSA-5fc8-gg7w-3g5c", CVE: "CVE-2026-24054", Fixed: Version{3, 26, 0, ""},
		What: "an image without layers has the host's disk plugged into the guest, under the host's file system",
	},
	{
		ID: "GHSA-877x-32pm-p28x", CVE: "CVE-2020-2026", Fixed: Version{1, 11, 1, ""},
		What: "the guest has the root file system mounted anywhere on the host",
	},
	{
		ID: "GHSA-6978-vg2j-cc9q", CVE: "CVE-2020-2023", Fixed: Version{1, 11, 1, ""},
		What: "a container reaches the guest's root device and becomes the guest's agent",
	},
}

// oldest is the first release that nothing in the list refuses whatever the hypervisor but Dragonball.
var oldest = Version{4, 0, 0, ""}

func (a Advisory) concerns(f Flavour, v Version, hypervisor string) bool {
	return v.Below(a.Fixed) &&
		(len(a.Flavours) == 0 || slices.Contains(a.Flavours, f)) &&
		(len(a.Hypervisors) == 0 || hypervisor == "" || slices.Contains(a.Hypervisors, hypervisor))
}

// JudgeVersion judges a release by itself. hypervisor is the table's name in the configuration; when it is not known
// (empty), what any of them would have counts.
func JudgeVersion(f Flavour, v Version, hypervisor string) []Finding {
	var found []Finding
	for _, a := range Advisories {
		if !a.concerns(f, v, hypervisor) {
			continue
		}
		found = append(found, Finding{
			Severity: Refuse, Advisory: a.ID, Key: "version",
			Problem: "Kata " + v.String() + " (" + string(f) + "): " + a.What,
			Remedy:  "install Kata Containers " + a.Fixed.String() + " or newer",
		})
	}
	return found
}
