package gitview

func (v *View) noteLocks() error       { return nil }
func (v *View) harvestShared() Harvest { return Harvest{Status: Shared} }
